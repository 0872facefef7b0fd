"""The one place that knows torch's versions and private names; every other file asks here.

Each name says what it promises; where torch changes, this folder changes and nothing else does.
"""

from torch.utils._pytree import tree_flatten, tree_unflatten

from gradgate._torch_compat._generators import draws_of
from gradgate._torch_compat._graph import (
    apply_function,
    bound_apply,
    current_node,
    function_class_of,
    latest_node_number,
    leaf_of,
    node_number,
    nodes_below,
    saved_tensors_of,
    schema_of,
)
from gradgate._torch_compat._modes import (
    DispatchMode,
    enter_mode,
    leave_mode,
    on_top,
    read_grad_mode,
    undispatched,
    write_grad_mode,
)
from gradgate._torch_compat._modules import (
    ModuleCall,
    anything_compiled,
    buffers_of,
    innermost_call,
    is_compiled,
    mixes_rows,
    watched_modules,
    without_compiled_wrappers,
)
from gradgate._torch_compat._parallel import (
    Replica,
    alone_in_replica,
    alone_in_shards,
    reduce_shards,
    replica_obstacle,
    shard_group,
    shard_roots,
    sync_buffers,
)
from gradgate._torch_compat._sharing import (
    copy_on_write,
    copy_tensors,
    find_non_finite,
    memory_holders,
    recorded_without_copy,
    without_copy,
    write_count,
    write_mark,
)
from gradgate._torch_compat._softmax import softmax_backward
from gradgate._torch_compat._tracing import (
    assert_later,
    has_data,
    holds_its_values,
    inside_forward_mode,
    inside_functorch,
    is_compiling,
    is_traced,
)

__all__ = [
    "DispatchMode",
    "ModuleCall",
    "Replica",
    "alone_in_replica",
    "alone_in_shards",
    "anything_compiled",
    "apply_function",
    "assert_later",
    "bound_apply",
    "buffers_of",
    "copy_on_write",
    "copy_tensors",
    "current_node",
    "draws_of",
    "enter_mode",
    "find_non_finite",
    "function_class_of",
    "has_data",
    "holds_its_values",
    "innermost_call",
    "inside_forward_mode",
    "inside_functorch",
    "is_compiled",
    "is_compiling",
    "is_traced",
    "latest_node_number",
    "leaf_of",
    "leave_mode",
    "memory_holders",
    "mixes_rows",
    "node_number",
    "nodes_below",
    "on_top",
    "read_grad_mode",
    "recorded_without_copy",
    "reduce_shards",
    "replica_obstacle",
    "saved_tensors_of",
    "schema_of",
    "shard_group",
    "shard_roots",
    "softmax_backward",
    "sync_buffers",
    "tree_flatten",
    "tree_unflatten",
    "undispatched",
    "watched_modules",
    "without_compiled_wrappers",
    "without_copy",
    "write_count",
    "write_grad_mode",
    "write_mark",
]
