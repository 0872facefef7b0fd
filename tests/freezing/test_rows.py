"""Rows that learn at the cost of rows: the same training as with the whole table, where only they may move."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import gradgate as gg
from gradgate.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError, FrozenMovedError
from tests import witness

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.3),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


class Language(nn.Module):
    """An embedding that is the output layer as well, as in most language models."""

    def __init__(self, size=7, width=3, tied=True, bias=False):
        super().__init__()
        self.embed = nn.Embedding(size, width)
        self.body = nn.Linear(width, width)
        self.out = nn.Linear(width, size, bias=bias)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, ids):
        return self.out(self.body(self.embed(ids)).tanh())


def pinned_twin(model, rows):
    """The oracle: the same model with all other rows pinned, which is proved elsewhere."""
    twin = copy.deepcopy(model)
    others = [row for row in range(model.embed.num_embeddings) if row not in rows]
    for parameter in {twin.embed.weight, twin.out.weight, *([twin.out.bias] if twin.out.bias is not None else [])}:
        gg.pin(parameter, rows=others)
    return twin


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_it_trains_as_the_whole_table_with_the_other_rows_pinned(optimizer, tied, bias):
    model, rows = Language(tied=tied, bias=bias), [1, 4]
    twin = pinned_twin(model, rows)
    handles = [gg.train_rows(model.embed, rows=rows)]
    if not tied:
        handles.append(gg.train_rows(model.out, rows=rows))
    assert len(handles[0].modules) == (2 if tied else 1)
    ours, theirs = optimizer(model.parameters()), optimizer(twin.parameters())
    for step in range(6):
        ids = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(step))
        for network, stepper in ((model, ours), (twin, theirs)):
            stepper.zero_grad()
            network(ids).logsumexp(-1).sum().backward()
            stepper.step()
        for (name, a), (other, b) in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
            assert name == other
            torch.testing.assert_close(a, b)
            torch.testing.assert_close(model.get_parameter(name), b)
    for handle in handles:
        handle.verify()


@pytest.mark.slow
def test_sparse_gradients_are_sparse_and_name_only_rows_that_were_met():
    model, twin = nn.Embedding(7, 3, sparse=True), nn.Embedding(7, 3, sparse=True)
    twin.load_state_dict(model.state_dict())
    gg.pin(twin.weight, rows=[0, 2, 3, 5, 6])
    training = gg.train_rows(model, rows=[1, 4])
    ours, theirs = (torch.optim.SparseAdam(p, lr=0.1) for p in (training.parameters(), twin.parameters()))
    for ids in ([4, 0, 4, 2], [0, 2], [1, 4], [4]):
        for network, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            network(torch.tensor(ids)).pow(2).sum().backward()
            optimizer.step()
        (small,) = training.parameters()
        assert small.grad.is_sparse
        assert {[1, 4][slot] for slot in small.grad.coalesce().indices()[0].tolist()} == {1, 4} & set(ids)
        torch.testing.assert_close(model.weight, twin.weight)
    training.verify()


@pytest.mark.slow
def test_the_gradient_passes_on_to_the_input_of_a_linear():
    linear = nn.Linear(4, 6).double()
    plain = copy.deepcopy(linear)
    gg.train_rows(linear, rows=[0, 5])

    def call(module):
        return lambda x: module(x)

    witness.witness(
        call(linear),
        call(plain),
        torch.randn(3, 4, dtype=torch.float64),
        promises={"gradcheck", "gradgradcheck", "func_grad", "vmap", "jvp", "noncontiguous", "compile", "fake"},
        empty=[torch.zeros(0, 4, dtype=torch.float64)],
    )


@pytest.mark.slow
@settings(max_examples=30, phases=[Phase.explicit, Phase.generate])  # each is slow, shrinking would take minutes
@given(st.data())
def test_the_gradient_of_the_rows_is_that_of_the_whole_table(data):
    size = data.draw(st.integers(1, 6))
    rows = data.draw(st.lists(st.integers(-size, size - 1), max_size=size))
    shape = data.draw(st.sampled_from([(), (0,), (1,), (4,), (2, 3), (2, 0)]))
    ids = torch.randint(0, size, shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    padding, sparse = data.draw(st.sampled_from([None, *range(size)])), data.draw(st.booleans())
    table = nn.Embedding(size, 3, padding_idx=padding, sparse=sparse)
    plain = nn.Embedding(size, 3, padding_idx=padding)  # dense: torch's sparse backward fails on a single id
    plain.load_state_dict(table.state_dict())
    training = gg.train_rows(table, rows)
    assert training.rows.tolist() == sorted({row % size for row in rows})
    weights = torch.randn(*shape, 3)
    out, expected = table(ids), plain(ids)
    assert torch.equal(out, expected)
    (expected * weights).sum().backward()
    (small,) = training.parameters()
    if out.requires_grad:
        (out * weights).sum().backward()
        assert small.grad.is_sparse == sparse
        torch.testing.assert_close(small.grad.to_dense(), plain.weight.grad[training.rows])
    else:
        assert not len(training.rows)
    assert table.weight.grad is None
    assert training.merge() is table.weight


@pytest.mark.slow
def test_only_the_rows_cost():
    table = nn.Embedding(50_000, 8)
    gg.train_rows(table, rows=range(10))
    optimizer = torch.optim.AdamW(table.parameters())
    table(torch.arange(0, 1000, 7)).sum().backward()
    optimizer.step()
    state = sum(v.numel() for s in optimizer.state.values() for v in s.values() if v.dim())
    assert state == 2 * 10 * 8
    assert state <= 0.01 * table.weight.numel()
    assert table.weight.grad is None


@pytest.mark.slow
def test_the_table_has_the_rows_after_every_step():
    model = Language()
    training = gg.train_rows(model.embed, rows=[2])
    optimizer = torch.optim.SGD(training.parameters(), lr=1.0)
    model(torch.tensor([2, 3])).sum().backward()
    optimizer.step()
    (small,) = training.parameters()
    assert torch.equal(model.embed.weight[2], small[0])
    small.data += 1  # by hand, without an optimizer: the state dict has it all the same
    assert torch.equal(model.state_dict()["embed.weight"][2], small[0])


# --- the state dict ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_state_dict_keeps_its_keys_and_loads_into_a_plain_model():
    model, plain = Language(bias=True), Language(bias=True)
    keys = list(model.state_dict())
    gg.train_rows(model.embed, rows=[2, 3])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.tensor([2, 5])).sum().backward()
    optimizer.step()
    assert list(model.state_dict()) == keys
    plain.load_state_dict(model.state_dict())
    ids = torch.arange(7)
    torch.testing.assert_close(plain(ids), model(ids))


@pytest.mark.slow
def test_loading_reaches_the_rows():
    model, other = Language(), Language()
    training = gg.train_rows(model.embed, rows=[2, 3])
    model.load_state_dict(other.state_dict())
    (small,) = training.parameters()
    assert torch.equal(small, other.embed.weight[[2, 3]])
    torch.testing.assert_close(model(torch.arange(7)), other(torch.arange(7)))
    with pytest.raises(FrozenMovedError):
        training.verify()
    training.accept()
    training.verify()


@pytest.mark.slow
def test_a_table_that_does_not_fit_is_torchs_own_error():
    model = Language()
    gg.train_rows(model.embed, rows=[2])
    with pytest.raises(RuntimeError, match=r"size mismatch for embed\.weight"):
        model.load_state_dict(Language(size=9).state_dict())
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "embed\.weight"'):
        nn.ModuleDict({"embed": model.embed}).load_state_dict({})


# --- merge, copies, conversions ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_merge_gives_the_plain_parameter_back():
    model = Language(bias=True)
    weight, names = model.embed.weight, [name for name, _ in model.named_parameters()]
    training = gg.train_rows(model.embed, rows=[2])
    assert not weight.requires_grad
    optimizer = torch.optim.SGD(training.parameters(), lr=1.0)
    model(torch.tensor([2])).sum().backward()
    optimizer.step()
    expected = model(torch.arange(7)).detach()
    assert training.merge() is weight
    assert training.merge() is weight
    assert model.embed.weight is model.out.weight is weight
    assert weight.requires_grad
    assert [name for name, _ in model.named_parameters()] == names
    assert not list(model.embed.buffers())
    assert not hasattr(weight, "_gradgate_watchers")
    torch.testing.assert_close(model(torch.arange(7)), expected)
    model(torch.tensor([2])).sum().backward()
    assert weight.grad is not None
    with pytest.raises(ArgumentValueError, match="this RowTraining freezes nothing any more"):
        training.verify()
    gg.train_rows(model.embed, rows=[3]).merge()


@pytest.mark.slow
def test_after_merge_the_same_optimizer_trains_the_whole_table():
    table = nn.Embedding(4, 2)
    training = gg.train_rows(table, rows=[1])
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)  # has the table and the rows
    table(torch.tensor([1])).sum().backward()
    optimizer.step()
    training.merge()
    before = table.weight.detach().clone()
    optimizer.zero_grad()
    table(torch.arange(4)).sum().backward()
    optimizer.step()
    assert torch.equal(table.weight, before - 1)


@pytest.mark.slow
def test_copies_and_pickles_go_on():
    model = Language(bias=True)
    training = gg.train_rows(model.embed, rows=[2])
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    other_model, other_training = copy.deepcopy((model, training))
    for other in (*others, other_model):
        optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
        before = other.embed.weight.detach().clone()
        other(torch.tensor([2, 4])).sum().backward()
        optimizer.step()
        moved = (other.embed.weight != before).any(dim=1)
        assert moved.tolist() == [row == 2 for row in range(7)]
        assert torch.equal(other.embed.weight[2], other.embed.weight_rows[0])
    other_training.verify()
    other_training.merge()
    gg.freezing.merge_rows(others[0])
    assert others[0].embed.weight.requires_grad
    assert others[0].embed.weight is others[0].out.weight
    training.verify()


@pytest.mark.slow
def test_conversion():
    model = Language(bias=True)
    training = gg.train_rows(model.embed, rows=[2])
    model.double()
    optimizer = torch.optim.SGD(training.parameters(), lr=1.0)
    model(torch.tensor([2, 4])).sum().backward()
    optimizer.step()
    training.verify()
    assert training.merge().dtype is torch.float64


@pytest.mark.slow
def test_compiled_and_autocast():
    model, plain = Language(bias=True), Language(bias=True)
    plain.load_state_dict(model.state_dict())
    training = gg.train_rows(model.embed, rows=[2])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(torch.arange(7)), plain(torch.arange(7)))
    compiled(torch.arange(7)).sum().backward()
    plain(torch.arange(7)).sum().backward()
    torch.testing.assert_close(training.parameters()[0].grad, plain.embed.weight.grad[[2]])
    torch._dynamo.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(torch.arange(7))
        assert out.dtype is plain(torch.arange(7)).dtype
        out.sum().backward()


@pytest.mark.slow
def test_functional_call():
    model = Language(bias=True)
    gg.train_rows(model.embed, rows=[2])
    ids = torch.tensor([2, 3])
    gradients = torch.func.grad(lambda p: torch.func.functional_call(model, p, (ids,)).sum())(
        {name: parameter.detach() for name, parameter in model.named_parameters()}
    )
    model(ids).sum().backward()
    torch.testing.assert_close(gradients["embed.weight_rows"], model.embed.weight_rows.grad)


class MovesAll(torch.optim.Optimizer):
    """Moves every parameter, gradient or not, as optimizers of other libraries may."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.5)


@pytest.mark.slow
@pytest.mark.parametrize("table_first", [False, True])
def test_the_table_has_the_rows_whatever_the_optimizer_does_to_it(table_first):
    table = nn.Embedding(4, 2)
    training = gg.train_rows(table, rows=[1])
    optimizer = MovesAll([table.weight, *training.parameters()][:: 1 if table_first else -1], {})
    for _ in range(3):
        optimizer.step()
        assert torch.equal(table.weight[1], training.parameters()[0][0])
    training.verify()


@pytest.mark.slow
def test_called_by_keyword_and_with_a_hook_of_the_user():
    table = nn.Embedding(4, 2)
    seen = []
    table.register_forward_hook(lambda module, args, output: seen.append(output.requires_grad))
    gg.train_rows(table, rows=[1])
    assert table(input=torch.tensor([1, 2])).requires_grad
    assert seen == [True]  # the user's hook sees the rows laid over


# --- what is refused -----------------------------------------------------------------------------------------------


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 2


@pytest.mark.slow
def test_what_it_cannot_do_it_says():
    with pytest.raises(ArgumentTypeError, match="module is the module Conv1d"):
        gg.train_rows(nn.Conv1d(2, 2, 1), rows=[0])
    with pytest.raises(ArgumentTypeError, match="module is the module Scaled"):
        gg.train_rows(Scaled(3, 2), rows=[0])
    with pytest.raises(ArgumentIndexError, match=r"train_rows\(\): row 3, -4 does not exist"):
        gg.train_rows(nn.Embedding(3, 2), rows=[0, 3, -4])
    with pytest.raises(ArgumentTypeError, match=r"train_rows\(\): `rows` is the list"):
        gg.train_rows(nn.Embedding(3, 2), rows=[0.5])
    with pytest.raises(ArgumentValueError, match="this Embedding has max_norm"):
        gg.train_rows(nn.Embedding(3, 2, max_norm=1.0), rows=[0])
    with pytest.raises(ArgumentValueError, match="this Embedding has scale_grad_by_freq"):
        gg.train_rows(nn.Embedding(3, 2, scale_grad_by_freq=True), rows=[0])
    table = nn.Embedding(3, 2)
    gg.train_rows(table, rows=[0])
    with pytest.raises(ArgumentValueError, match="rows of this Embedding learn already"):
        gg.train_rows(table, rows=[1])


@pytest.mark.slow
def test_a_tie_to_something_else_is_refused():
    table, conv = nn.Embedding(3, 2), nn.Conv1d(2, 3, 1)
    conv.weight = table.weight
    with pytest.raises(ArgumentTypeError, match="the weight of `module` is tied to the module Conv1d"):
        gg.train_rows(table, rows=[1])


@pytest.mark.slow
def test_an_optimizer_that_was_built_too_early_is_told_at_its_first_step():
    table = nn.Embedding(3, 2)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    training = gg.train_rows(table, rows=[1])
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ArgumentValueError, match="this SGD has the table and not the rows that learn"):
        optimizer.step()
    optimizer.add_param_group({"params": training.parameters()})
    optimizer.step()
    assert table.weight[1, 0] == training.parameters()[0][0, 0]


@pytest.mark.slow
def test_thaw_leaves_the_table_to_merge():
    table = nn.Embedding(3, 2)
    training = gg.train_rows(table, rows=[1])
    gg.freezing.thaw(table)
    assert not table.weight.requires_grad
    training.merge()
    assert table.weight.requires_grad


@pytest.mark.slow
def test_it_can_be_saved_to_a_file():
    table = nn.Embedding(3, 2)
    gg.train_rows(table, rows=[1])
    file = io.BytesIO()
    torch.save(table, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    gg.freezing.merge_rows(other)
    assert torch.equal(other.weight, table.weight)
