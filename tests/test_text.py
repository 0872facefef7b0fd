"""Text that is safe to print: one law for everything that is shown, one for everything that is written as JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradgate._text import as_text, class_name, json_text, plain, text_of, visible
from gradgate.errors import LedgerError

ANYTHING = st.text(st.characters())  # Surrogates, controls, marks and all.
NASTY = "\x1b]0;title\x07 \x9b31m \u202egnp.\u2066 \ud800 \x7f \u2028 \r\n\t e\u0301 \U000e0041 \x00"


@given(ANYTHING)
def test_whatever_is_made_visible_is_printable_and_encodable(text):
    assert visible(text).isprintable()
    visible(text).encode()
    assert visible(text, lines=True).translate({ord("\n"): None, ord("\t"): None}).isprintable()
    if text.isprintable():
        assert visible(text) == text


def test_what_does_not_show_is_an_escape():
    assert visible("img\x1b[2J\u202e.png\n") == r"img\x1b[2J\u202e.png\n"
    assert json_text({"name": "é \x9b \ud800", "loss": float("nan")}) == r'{"name": "é \u009b \ud800", "loss": "nan"}'


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | ANYTHING,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(TREES, st.sampled_from([None, 2]))
def test_json_says_the_same_in_printable_characters(tree, indent):
    text = json_text(tree, indent=indent)
    assert text.replace("\n", "").isprintable()
    text.encode()
    assert json.loads(text) == tree


def test_numbers_and_objects_that_json_does_not_have_become_text():
    deep = []
    for _ in range(5_000):
        deep = [deep]
    values = {1: float("nan"), "b": float("-inf"), "c": 2**70, "d": b"xy", "e": {3}, "f": object}
    assert plain(values) == {
        "1": "nan",
        "b": "-inf",
        "c": hex(2**70),
        "d": "<2 bytes>",
        "e": [3],
        "f": "<class 'object'>",
    }
    assert plain({"shape": (2, 3)}) == {"shape": [2, 3]}
    assert json_text(deep).startswith("[[[")
    assert as_text("x" * 20, 5) == "xxxxx... (15 more characters)"


@pytest.mark.parametrize("answer", [7, None, ValueError, KeyboardInterrupt])
def test_a_text_that_cannot_be_had_is_said(answer):
    class Odd(Exception):
        def __str__(self):
            if isinstance(answer, type):
                raise answer
            return answer

    if answer is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            text_of(Odd())
    else:
        assert text_of(Odd()).endswith("Odd without a readable text")


def test_the_names_of_classes():
    assert class_name(ValueError) == "ValueError"
    assert class_name(json.JSONDecodeError) == "json.decoder.JSONDecodeError"
    assert text_of(ValueError("too long")) == "too long"


def test_errors_print_without_control_characters():
    said = str(LedgerError(f"the sample {NASTY}.", why=NASTY, fix=NASTY))
    assert said.count("\n") == 2 + 3  # Ends of lines stay.
    assert said.replace("\n", "").replace("\t", "").isprintable()
