"""Stop strings and characters over pieces, against the same work done one character at a time."""

import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from sumibi.engine.text import ChoiceText, StopStrings, TextOptions
from sumibi.prompts.tokenizer import Tokenizer

texts = st.text("abc", max_size=30)
stop_sets = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple)


def brute_force(text, stops, include):
    """The first position at which some stop string is complete ends the text."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)  # of several that end here, the one that began first
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(texts, stop_sets, st.booleans(), st.data())
def test_stop_strings_end_the_text_at_the_same_place_however_it_is_cut(text, stops, include, data):
    matcher = StopStrings(stops, include=include)
    seen, rest = "", text
    stop = None
    while rest and stop is None:
        cut = data.draw(st.integers(1, len(rest)))
        piece, stop = matcher.feed(rest[:cut])
        rest = rest[cut:]
        seen += piece
        assert brute_force(text, stops, include)[0].startswith(seen)
    if stop is None:
        seen += matcher.rest()
    assert (seen, stop) == brute_force(text, stops, include)


def byte_tokenizer():
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    model = tokenizers.models.BPE({char: i for i, char in enumerate(sorted(alphabet))}, [])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend)


TOKENIZER = byte_tokenizer()


def choice(text, **options):
    """Push a text byte by byte; returns the pieces, the rest and the choice."""
    state = ChoiceText(TOKENIZER, [], TextOptions(**options))
    pieces = []
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        pieces.append(state.push(token))
        if state.stop is not None:
            break
    return pieces, state.finish(), state


def test_characters_of_several_tokens_come_out_whole():
    pieces, rest, _ = choice("aé火🔥")
    assert pieces == ["a", "", "é", "", "", "火", "", "", "", "🔥"]
    assert rest == ""


def test_half_a_character_at_the_end_is_shown_as_such():
    state = ChoiceText(TOKENIZER, [], TextOptions())
    assert state.push(TOKENIZER.encode("火", add_special_tokens=False)[0]) == ""
    assert state.finish() == "\ufffd"


def test_what_may_become_a_stop_string_is_held_back_until_it_is_decided():
    pieces, rest, state = choice("one STOX two STOP three", stops=("STOP",))
    assert "".join(pieces) == "one STOX two "
    assert not any(piece.endswith(("S", "ST", "STO")) for piece in pieces)
    assert (rest, state.stop) == ("", "STOP")


def test_a_beginning_of_a_stop_string_at_the_very_end_is_text():
    pieces, rest, state = choice("one STO", stops=("STOP",))
    assert ("".join(pieces), rest, state.stop) == ("one ", "STO", None)


def test_stop_strings_do_not_count_before_min_tokens():
    pieces, rest, state = choice("ab ab ab", stops=("b",), min_tokens=3)
    assert ("".join(pieces) + rest, state.stop) == ("ab a", "b")
