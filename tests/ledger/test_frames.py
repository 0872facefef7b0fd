"""The incidents as data frames: typed columns, times in UTC, and a NaN that is not a missing value."""

import math
import sys
from datetime import UTC, datetime

import pytest

import gradgate as gg
from gradgate.records import Incident
from tests.ledger.made import incident

AT = 1_794_000_000.25


@pytest.fixture
def ledger(tmp_path):
    ledger = gg.Ledger(tmp_path / "run.ledger", run="night")
    ledger.record_many(
        [
            incident("a.png", step=3, loss=math.nan, time=AT, details={"shape": [1, 2]}),
            incident("b.png", step=None, loss=None, time=1e300, transient=True),
            incident("c.png", step=2**40, loss=0.0, time=AT + 1),
        ]
    )
    return ledger


def test_pandas(ledger):
    pytest.importorskip("pandas")
    frame = ledger.to_pandas().set_index("sample_id", drop=False)
    assert list(frame) == list(Incident.__dataclass_fields__)
    kinds = {name: str(kind) for name, kind in frame.dtypes.items()}
    assert kinds["step"] == "Int64"
    assert kinds["loss"] == "Float64"
    assert kinds["transient"] == "bool"
    assert kinds["cause"] == "string"
    assert kinds["time"] == "datetime64[us, UTC]"
    assert frame.loc["a.png", "time"] == datetime.fromtimestamp(AT, UTC)
    assert frame["time"].isna().tolist() == [False, False, True]  # in the order of time; no calendar has the last
    assert math.isnan(frame.loc["a.png", "loss"])
    assert frame["loss"].isna().to_dict() == {"a.png": False, "b.png": True, "c.png": False}
    assert frame.loc["c.png", "step"] == 2**40
    assert frame.loc["a.png", "details"] == '{"shape": [1, 2]}'


def test_polars(ledger):
    polars = pytest.importorskip("polars")
    frame = ledger.to_polars()
    assert frame.columns == list(Incident.__dataclass_fields__)
    assert frame.schema["time"] == polars.Datetime("us", "UTC")
    assert frame.schema["step"] == polars.Int64
    assert frame["step"].to_list() == [3, 2**40, None]
    assert frame["time"].to_list() == [datetime.fromtimestamp(AT, UTC), datetime.fromtimestamp(AT + 1, UTC), None]
    assert frame["loss"].is_nan().to_list() == [True, False, None]


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_filters_and_nothing(ledger, name):
    pytest.importorskip(name)
    frame = getattr(ledger, f"to_{name}")
    assert frame(transient=True)["sample_id"].to_list() == ["b.png"]
    assert frame(run="another").shape == (0, len(Incident.__dataclass_fields__))
    assert frame(run="another").dtypes is not None


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_what_to_install(ledger, name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(gg.GradgateError) as caught:
        getattr(ledger, f"to_{name}")()
    assert f"{name} needs {name}, which is not installed." in str(caught.value)
    assert f"Fix: pip install 'gradgate[{name}]'" in str(caught.value)
