"""Stop strings: where the search ends, what the stream shows, how the text is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.test_detokenize import TOKENIZERS
from tunix.text.stop import AnswerStream, StopSearch, cut

STOPS = st.lists(st.text("ab é日\ufffd", min_size=1, max_size=3), min_size=1, max_size=3)


def test_cut():
    """The string that begins first counts, of two that begin together the shorter one."""
    assert cut("one two three", ("three", "two")) == "one "
    assert cut("one two three", ("three", "two"), include=True) == "one two"
    assert cut("abc", ("abc", "ab"), include=True) == "ab"
    assert cut("abc", ("x",)) == "abc"
    assert cut("abc", ()) == "abc"


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_search_and_stream_agree_with_decoding_all_ids(name, data):
    """The rule, written down slowly: the first prefix of ids whose decoding has a stop string."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=24))
    stop, include = data.draw(STOPS), data.draw(st.booleans())

    def text(size):
        return tokenizer.decode(ids[:size], skip_special_tokens=True)

    ends = [n for n in range(1, len(ids) + 1) if any(s in text(n) for s in stop)]
    search = StopSearch(tokenizer, stop)
    found = [n for n, token in enumerate(ids, 1) if search.push(token)]
    assert found[:1] == ends[:1]

    size = ends[0] if ends else len(ids)
    stream = AnswerStream(tokenizer, frozenset(), stop, include)
    pieces = [stream.push(token) for token in ids[:size]] + [stream.flush()]
    assert "".join(pieces) == cut(text(size), stop, include)


def test_a_stream_shows_neither_a_stop_id_nor_the_beginning_of_a_stop_string():
    tokenizer = TOKENIZERS["characters"]
    a, b, c = (tokenizer.token_id(x) for x in "abc")
    stream = AnswerStream(tokenizer, {c}, ("abb",))
    assert [stream.push(i) for i in (b, a, a, b, a, c)] == ["b", "", "a", "", "ab", ""]
    assert stream.flush() == "a"


def test_the_search_keeps_no_more_than_it_needs():
    search = StopSearch(TOKENIZERS["characters"], ("cab",))
    a, b = (TOKENIZERS["characters"].token_id(x) for x in "ab")
    assert not any(search.push(i) for i in [a, b] * 500)
    assert search._tail == "ab"


def test_byte_runs_are_searched_before_they_are_certain():
    """A line end is a byte token in Llama 2: the search needs not wait for the next piece."""
    tokenizer = TOKENIZERS["sentence_piece"]
    search = StopSearch(tokenizer, ("a\n",))
    assert [search.push(i) for i in (tokenizer.token_id("a"), 3 + 0x0A)] == [False, True]
