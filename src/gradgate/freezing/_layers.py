"""Whole parameters and layers that do not move: `freeze`, `train_only` and `thaw`."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from gradgate._checks import wrong_type
from gradgate._names import describe, listed, nearest
from gradgate._torch_private import as_written, is_power_iteration, local_part, without_compiled_wrappers
from gradgate.errors import ArgumentTypeError, ArgumentValueError, NothingMatchedError
from gradgate.freezing._freeze_state import (
    ROWS_TOKEN,
    freeze_state_of,
    gathered,
    holds,
    make_freeze_state,
    release,
    replicated,
    whole_region,
)
from gradgate.freezing._verify import Part, Verified, computed_by, computed_value


class FreezeHandle(Verified):
    """What one call froze; made by `freeze` and `train_only`.

    As a context manager it thaws at the end of the block. A parameter that several handles freeze is free when all of
    them have thawed, in any order.

    Attributes:
        model: The model.
        names: The frozen parameters, each under every name it has.
        tied: For each name that shares its values with others: those others. They are frozen with it.
        statistics: The modules whose running statistics are stopped.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> handle = gg.freeze(model, "0.*")
        >>> handle
        FreezeHandle(0.weight, 0.bias)
        >>> handle.thaw()
    """

    def __init__(self, model: nn.Module, names: list[str], label: str, *, statistics: bool) -> None:
        known, modules = named_parameters(model), named_modules(model)
        check_values({name: known[name] for name in names}, "freeze")
        ties = ties_of(known)
        chosen = set(names).union(*(ties.get(name, ()) for name in names))
        self.model = model
        self._parameters = {name: parameter for name, parameter in known.items() if name in chosen}
        self.names = tuple(self._parameters)
        self.tied = {name: ties[name] for name in self.names if name in ties}
        self._owners = {name: modules[name.rpartition(".")[0]] for name in self.names}
        self._modules = _at_rest(model, self._parameters.values()) if statistics else {}
        self.statistics = tuple(self._modules)
        self._token = uuid.uuid4().hex
        self._thawed = False
        synchronised = replicated()
        for parameter in self._parameters.values():
            state = make_freeze_state(parameter)
            state.freeze(parameter, self._token, label, synchronised=id(parameter) in synchronised)
        for module in self._modules.values():
            stop_statistics(module, self._token)
        self.accept()

    @property
    def active(self) -> bool:  # type: ignore[override]
        """Whether it still freezes anything; `gg.freezing.thaw` may have freed all of it."""
        return not self._thawed and (not self.names or any(holds(p, self._token) for p in self._parameters.values()))

    def thaw(self) -> None:
        """Let what no other handle freezes learn again, as it did before. A second call does nothing.

        Raises:
            ArgumentValueError: DistributedDataParallel would never synchronise a parameter; nothing is thawed then.
        """
        if not self.active:
            return
        _check_synchronised(self._parameters, self._token)
        self._thawed = True
        for parameter in self._parameters.values():
            release(parameter, self._token)
        for module in self._modules.values():
            release_statistics(module, self._token)

    def release_state(self, *optimizers: torch.optim.Optimizer) -> int:
        """Drop the optimizer state of the frozen parameters; when they thaw, it begins anew.

        Args:
            *optimizers: The optimizers; `gg.trainable(model, optimizer)` shows how much state they have.

        Returns:
            How many bytes of tensors were dropped.
        """
        frozen = [parameter for parameter in self._parameters.values() if holds(parameter, self._token)]
        released = 0
        for optimizer in optimizers:
            for parameter in frozen:
                released += state_bytes(optimizer, parameter)
                optimizer.state.pop(parameter, None)
        return released

    def _frozen(self) -> dict[str, Part]:
        # As the model has it now, so that a parameter that was replaced shows.
        now = named_parameters(self.model)
        found: dict[str, tuple[torch.Tensor, str]] = {}
        for name, old in self._parameters.items():
            if holds(old, self._token):
                owner, own = self._owners[name], name.rpartition(".")[2]
                how = computed_by(owner, own)
                found[name] = (computed_value(owner, own) if how else now.get(name, old), how)
        for name, module in self._modules.items():
            for buffer in statistics_of(module):
                found[f"{name}.{buffer}".lstrip(".")] = (module.get_buffer(buffer), "")
        return {name: (tensor.detach(), whole_region(tensor), how) for name, (tensor, how) in found.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.thaw()

    def __repr__(self) -> str:
        parts = [listed(self.names)]
        if self.tied:
            groups = dict.fromkeys(tuple(sorted((name, *others))) for name, others in self.tied.items())
            parts.append("tied: " + listed([" = ".join(group) for group in groups]))
        if self.statistics:
            parts.append(f"statistics of {listed([name or 'the model' for name in self.statistics])}")
        return f"FreezeHandle({'; '.join(parts)}{'' if self.active else '; thawed'})"


def freeze(model: nn.Module, *what: Selector, statistics: bool = True) -> FreezeHandle:
    """Keep parameters from moving: bit-identical after any number of steps of any optimizer.

    The parameter stops requiring a gradient and loses the one it has; no step finds one on it, so neither decay nor
    warm momentum moves it. Running statistics (BatchNorm) of a frozen part stop too, whatever `model.train()` says:
    such a layer then computes as in `eval()`.

    Freeze before DistributedDataParallel to save the work of the gradient: DDP waits for that of a parameter which is
    frozen after the wrap, and it is 0. Freeze an FSDP2 model after `fully_shard`.

    Args:
        model: The model; DDP and torch.compile around it are ignored.
        *what: Globs (`"encoder.*"`) of full names of parameters or modules, compiled regexes, modules, parameters, or
            predicates `(name, parameter) -> bool`; without any, the whole model. The prefix of a wrapper
            (`base_model.model.` in PEFT) may be left out.
        statistics: Whether running statistics stop, of modules whose parameters (or those around) are all frozen.

    Returns:
        A handle to thaw and to verify; also a context manager. Dropping the reference does not thaw.

    Raises:
        NothingMatchedError: A selector matches nothing; the nearest names are given.
        ArgumentValueError: Something of another model, without values yet, or gathered by FSDP2 for the moment.
        ArgumentTypeError: `model` is no module, or a selector is of a kind that selects nothing.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> with gg.freeze(model, "0.*", "*.bias") as handle:
        ...     print(*handle.names)
        0.weight 0.bias 1.bias
        >>> all(parameter.requires_grad for parameter in model.parameters())
        True
    """
    return _freeze(model, what, statistics, "freeze")


def train_only(model: nn.Module, *what: Selector, statistics: bool = True) -> FreezeHandle:
    """Freeze everything but this.

    What is named keeps learning if it does; what was switched off by hand, or is frozen by another handle, stays so.

    Args:
        model: The model.
        *what: What learns, as for `freeze`; at least one selector.
        statistics: Whether running statistics of the frozen rest stop.

    Returns:
        The handle of the frozen rest.

    Raises:
        NothingMatchedError: A selector matches nothing.
        ArgumentValueError: There is no selector, or a module or parameter of another model was given.
        ArgumentTypeError: `model` is no module, or a selector is of a kind that selects nothing.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> gg.train_only(model, "1.*")
        FreezeHandle(0.weight, 0.bias)
    """
    if not what:
        why = f"all of {listed(list(named_parameters(bare(model, 'train_only'))))} would be frozen."
        fix = "gg.freeze(model)   # if that is meant"
        raise ArgumentValueError("train_only(): nothing is named that should learn.", why=why, fix=fix)
    return _freeze(model, what, statistics, "train_only")


def _freeze(model: nn.Module, what: Sequence[Selector], statistics: bool, function: str) -> FreezeHandle:
    if not isinstance(statistics, bool):
        why = "it says whether running statistics stop (True) or run on (False)."
        raise wrong_type(statistics, "statistics", function, why, "statistics=False")
    inner = bare(model, function)
    selected = set(select(inner, what, function))
    names = [name for name in named_parameters(inner) if (name in selected) == (function == "freeze")]
    label = f"{function}({', '.join(wording(selector) for selector in what)})"
    return FreezeHandle(inner, names, label, statistics=statistics)


def check_values(parameters: dict[str, Any], function: str) -> None:
    """Make sure that parameters have values, which stay where they are."""
    if empty := [name for name, one in parameters.items() if is_lazy(one) or getattr(one, "is_meta", False)]:
        why = "a lazy module makes its parameters at the first forward, a meta device has none at all."
        fix = f"model(example_batch)   # or to_empty(device=...) and load_state_dict, before the {function}"
        raise ArgumentValueError(f"{function}(): {listed(empty)} has no values yet.", why=why, fix=fix)
    whole = gathered()
    if empty := [name for name, one in parameters.items() if id(one) in whole]:
        why = f"after the next backward it is a shard again, on which this {function} would have no effect."
        fix = f"model.reshard()   # on all its parts, then {function}"
        raise ArgumentValueError(f"{function}(): FSDP2 has gathered {listed(empty)} for the moment.", why=why, fix=fix)


def thaw(model: nn.Module, *what: Selector) -> None:
    """Remove every freeze and every pin from these parameters.

    For copies and unpickled models, which are frozen as the original was but have no handle.

    Args:
        model: The model.
        *what: What to thaw, as for `freeze`. Tables under `train_rows` stay as they are: `merge` frees them.

    Raises:
        NothingMatchedError: A selector matches nothing.
        ArgumentValueError: DistributedDataParallel would never synchronise the thawed parameter.

    Examples:
        >>> model = torch.nn.Linear(2, 2)
        >>> handle = gg.freeze(model)
        >>> gg.freezing.thaw(model)
        >>> model.weight.requires_grad
        True
    """
    inner = bare(model, "thaw")
    known = named_parameters(inner)
    names = select(inner, what, "thaw")
    _check_synchronised({name: known[name] for name in names}, None)
    for name in names:
        parameter = known[name]
        if (frozen := freeze_state_of(parameter)) is not None:
            for token in {*frozen.freezes, *frozen.pins} - {ROWS_TOKEN}:
                frozen.release(parameter, token)
    for module in _at_rest(inner, [known[name] for name in names]).values():
        release_statistics(module, None)


def _at_rest(model: nn.Module, frozen: Iterable[nn.Parameter]) -> dict[str, nn.Module]:
    """List the modules with statistics all of whose parameters are frozen."""
    # One without parameters goes with the nearest module around it that has some.
    ids = {id(parameter) for parameter in frozen}
    everything = named_modules(model)
    found = {}
    for name, module in everything.items():
        if has_statistics(module):
            around = [everything[part] for part in (*with_parents(name), "") if part in everything]
            own = next((list(part.parameters()) for part in around if any(True for _ in part.parameters())), [])
            if own and all(id(parameter) in ids for parameter in own):
                found[name] = module
    return found


def _check_synchronised(parameters: dict[str, nn.Parameter], token: str | None) -> None:
    """Refuse to free what DDP does not know: it would learn on each process for itself."""
    known_to_ddp = replicated()
    for name, parameter in parameters.items():
        frozen = freeze_state_of(parameter)
        if frozen is None or frozen.synchronised or not frozen.learned or id(parameter) not in known_to_ddp:
            continue
        if set(frozen.freezes) == {token} or (token is None and set(frozen.freezes) - {ROWS_TOKEN}):
            what = f"thaw(): `{name}` was frozen when DistributedDataParallel was built."
            why = "DDP would not synchronise its gradient, and the processes would drift apart silently."
            fix = "model = DistributedDataParallel(model.module)   # after thawing; or freeze only after the wrap"
            raise ArgumentValueError(what, why=why, fix=fix)


def state_bytes(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int:
    state = optimizer.state.get(parameter, {})
    return sum(local_part(value).nbytes for value in state.values() if isinstance(value, torch.Tensor))


# --- Who is meant ---------------------------------------------------------------------------------------------------


Selector = str | re.Pattern[str] | nn.Module | torch.Tensor | Callable[[str, nn.Parameter], bool]


def bare(model: nn.Module, function: str) -> nn.Module:
    """Return the model itself, without DistributedDataParallel and torch.compile around it."""
    if not isinstance(model, nn.Module):
        fix = f"{function}(model, parameter)   # the model first; a tensor of its own: gg.pin(tensor, ...)"
        raise wrong_type(model, "model", function, "names and patterns are looked up in a torch.nn.Module.", fix)
    while True:
        inner = without_compiled_wrappers(model.module if isinstance(model, DistributedDataParallel) else model)
        if inner is model:
            return model
        model = inner


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter under every name it has, in the model's order; tied ones come several times."""
    return {as_written(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    return {
        as_written(name): module
        for name, module in model.named_modules(remove_duplicate=False)
        if without_compiled_wrappers(module) is module
    }


def select(model: nn.Module, what: Sequence[Selector], function: str) -> list[str]:
    """Return the names of all parameters that any of the selectors selects; with no selector, all of them."""
    # A glob or a regex selects a parameter if it matches the parameter's full name or that of a module around it.
    known = named_parameters(model)
    chosen: set[int] = set()
    for selector in what:
        found = {id(known[name]) for name in _matched(model, known, selector, function)}
        if not found:
            raise _nothing(model, known, selector, function)
        chosen |= found
    if not known:
        raise _nothing(model, known, "*", function)
    return [name for name, parameter in known.items() if not what or id(parameter) in chosen]


def ties_of(known: dict[str, nn.Parameter]) -> dict[str, tuple[str, ...]]:
    """Find the parameters that share memory: one object under several names, or several objects over one storage."""
    pieces: dict[object, list[tuple[int, int, str]]] = {}
    for name, parameter in known.items():
        part = local_part(parameter)
        reach = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        start = int(part.storage_offset()) * part.element_size()
        stop = start + (reach + 1) * part.element_size()
        storage = part.untyped_storage().data_ptr() if part.numel() else f"empty {id(parameter)}"
        pieces.setdefault(storage, []).append((start, stop, name))
    groups: list[list[str]] = []
    for storage_pieces in pieces.values():
        end = -1
        for start, stop, name in sorted(storage_pieces):
            if start >= end:
                groups.append([])
            groups[-1].append(name)
            end = max(end, stop)
    together = {name: set(group) for group in groups if len(group) > 1 for name in group}
    return {
        name: tuple(other for other in known if other in together[name] - {name}) for name in known if name in together
    }


def wording(selector: Selector) -> str:
    if isinstance(selector, re.Pattern):
        return f"re.compile({selector.pattern!r})"
    if isinstance(selector, str):
        return repr(selector)
    if isinstance(selector, nn.Module | torch.Tensor):
        return describe(selector).removeprefix("the ").removeprefix("a ")
    return f"{getattr(selector, '__name__', 'predicate')}()"


def _matched(model: nn.Module, known: dict[str, nn.Parameter], selector: Selector, function: str) -> list[str]:
    if isinstance(selector, str | re.Pattern):
        matches = partial(fnmatchcase, pat=selector) if isinstance(selector, str) else selector.search
        # By the names in the model; where they match nothing, by those in the model that it is a wrapper of.
        for prefix in _wrappers(model):
            parts_of = [(name, with_parents(name.removeprefix(prefix))) for name in known if name.startswith(prefix)]
            if found := [name for name, parts in parts_of if any(map(matches, parts))]:
                return found
        return []
    if isinstance(selector, nn.Module):
        selector = without_compiled_wrappers(selector)
        if all(module is not selector for module in model.modules()):
            raise _foreign(model, f"the module {type(selector).__name__}", function)
        members = {id(parameter) for parameter in selector.parameters()}
        return [name for name, parameter in known.items() if id(parameter) in members]
    if isinstance(selector, torch.Tensor):
        names = [name for name, parameter in known.items() if parameter is selector]
        if not names:
            raise _foreign(model, describe(selector), function)
        return names
    if callable(selector):
        return [name for name, parameter in known.items() if selector(name, parameter)]
    why = "a selector is a glob, a compiled regex, a module, a parameter, or a predicate(name, parameter)."
    fix = f'{function}(model, "encoder.*", re.compile(r"\\.bias$"), model.head)'
    raise ArgumentTypeError(f"{function}(): {describe(selector)} selects nothing.", why=why, fix=fix)


def _wrappers(model: nn.Module) -> Iterator[str]:
    """Return the prefix of names in a model, and in what it wraps if all its parameters are those of one child."""
    path: list[str] = []
    while True:
        yield "".join(f"{as_written(name)}." for name in path if as_written(name))
        children = [
            (name, child) for name, child in model.named_children() if next(child.parameters(), None) is not None
        ]
        if len(children) != 1 or next(model.parameters(recurse=False), None) is not None:
            return
        name, model = children[0]
        path.append(name)


def with_parents(name: str) -> list[str]:
    """List a parameter's name and those of the modules around it: a.b.c, a.b, a."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _foreign(model: nn.Module, thing: str, function: str) -> ArgumentValueError:
    why = "freezing it here would not show in this model, and thawing this model would not free it."
    return ArgumentValueError(f"{function}(): {thing} does not belong to this {type(model).__name__}.", why=why)


def _nothing(
    model: nn.Module, known: dict[str, nn.Parameter], selector: Selector, function: str
) -> NothingMatchedError:
    names = [*known, *filter(None, named_modules(model))]
    text = selector if isinstance(selector, str) else getattr(selector, "pattern", "")
    like = nearest(text.strip("*.^$\\"), names) or nearest(text, names)
    why = f"the parameters are {listed(list(known))}." if known else "the model has no parameters."
    guess = f"{like[0]!r}   # did you mean {listed([repr(name) for name in like])}?" if like else ""
    what = f"{function}(): {wording(selector)} matches no parameter of {type(model).__name__}."
    why = "it has no parameters." if isinstance(selector, nn.Module) else why
    return NothingMatchedError(what, why=why, fix=guess or "print(gg.trainable(model))")


# --- Statistics of frozen layers ------------------------------------------------------------------------------------


class Asleep:
    """Replaces the `train` method of a module: it notes the mode, and the module stays in evaluation mode."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.asked = module.training
        self.tokens: set[str] = set()

    def __call__(self, mode: bool = True) -> nn.Module:
        self.asked = mode
        self.module.training = False
        return self.module


def has_statistics(module: nn.Module) -> bool:
    return next(statistics_of(module), None) is not None


def statistics_of(module: nn.Module) -> Iterator[str]:
    """Return the names of the buffers that training would move, of norms and of the spectral norm."""
    for name, _ in module.named_buffers(recurse=False):
        if name.startswith("running_") or name == "num_batches_tracked" or is_power_iteration(module, name):
            yield name


def stopped(module: nn.Module) -> Asleep | None:
    """Return what stops the statistics of a module, if anything does."""
    train = module.__dict__.get("train")
    return train if isinstance(train, Asleep) else None


def stop_statistics(module: nn.Module, token: str) -> None:
    asleep = module.__dict__["train"] = stopped(module) or Asleep(module)
    asleep.tokens.add(token)
    module.training = False


def release_statistics(module: nn.Module, token: str | None) -> None:
    """Let the statistics run again, unless other tokens stop them; without a token in any case."""
    if (asleep := stopped(module)) is not None:
        asleep.tokens -= asleep.tokens if token is None else {token}
        if not asleep.tokens:
            del module.__dict__["train"]
            module.training = asleep.asked
