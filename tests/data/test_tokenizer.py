import numpy as np
import pytest

from stability_lab.data.tokenizer import ByteTokenizer


@pytest.mark.parametrize("text", ["", "plain", "naïve € 你好 🙂\n\x00\r\n"])
def test_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text.encode())
    assert ids.dtype == np.uint16
    assert ids.shape == (len(text.encode()),)
    assert tokenizer.decode(ids) == text


def test_every_byte_is_its_own_id() -> None:
    np.testing.assert_array_equal(ByteTokenizer().encode(bytes(range(256))), np.arange(256))


def test_decode_shows_document_ends_and_broken_text() -> None:
    decode = ByteTokenizer().decode
    assert decode([256, 97, 256, 256, 98, 256]) == "<|endoftext|>a<|endoftext|><|endoftext|>b<|endoftext|>"
    # Half a character before a document's end must not swallow the end.
    assert decode([0xC3, 256, 0xA9]) == "\ufffd<|endoftext|>\ufffd"
    assert decode([]) == ""


@pytest.mark.parametrize("ids", [[-1], [257], [0, 70000]])
def test_decode_refuses_other_ids(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="must lie from 0 to 256"):
        ByteTokenizer().decode(ids)
