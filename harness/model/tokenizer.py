"""Text to token ids and back, and the one question two tiers must agree on: is it the same vocabulary?"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from harness.errors import UserError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the harness asks of a tokenizer.

    ``eos_ids``  ids that end a generation; may be empty.
    ``vocab_size``  one more than the largest token id. A checkpoint's logits may be wider (padding), never narrower.
    ``has_chat``  whether there is a chat template; without one ``chat`` is ``encode``.
    ``digest``  sha256 over the sorted (token, id) pairs: two tokenizers number the same tokens alike iff it is equal.
    """

    eos_ids: frozenset[int]
    vocab_size: int
    digest: str
    has_chat: bool

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt: behind a BOS token if this tokenizer puts one there, with nothing else added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, special tokens skipped."""
        ...

    def chat(self, user: str, earlier: Sequence[tuple[str, str]] = ()) -> list[int]:
        """Prompt ids of a user's message, up to where the answer starts; ``encode`` if there is no chat template.

        ``earlier`` has the messages before it, the user's and the answer to it, which a template alone can mark.
        """
        ...


def vocab_digest(vocab: Mapping[str, int]) -> str:
    """Sha256 (hex) over the sorted (token, id) pairs."""
    return hashlib.sha256(json.dumps(sorted(vocab.items())).encode()).hexdigest()


class HFTokenizer:
    """The tokenizer in a local checkpoint folder, read by ``transformers``.

    ``transformers`` decides which class a folder means and how it adds BOS, so it does the reading although the bare
    ``tokenizers`` library would load 0.9 s sooner. Never touches the network, never runs code from the folder.
    """

    def __init__(self, path: Path | str, eos_ids: Iterable[int]) -> None:
        """Read ``path``; ``eos_ids`` come from the checkpoint's generation config. Raises UserError without files."""
        folder = Path(path)
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise UserError(f"no tokenizer in {str(folder)!r}: expected one of {', '.join(_TOKENIZER_FILES)}.")
        from transformers import AutoTokenizer

        try:
            self._tok = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except (ValueError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"the tokenizer in {str(folder)!r} cannot be read: {reason}.") from error
        self.eos_ids = frozenset(eos_ids)
        vocab = self._tok.get_vocab()
        self.vocab_size = 1 + max(vocab.values())  # ids may have gaps
        self.digest = vocab_digest(vocab)
        self._prefix = self._bos_prefix()
        self.has_chat = bool(self._tok.chat_template)

    def _bos_prefix(self) -> list[int]:
        """[BOS] if the tokenizer puts it before a text by itself, else []. An EOS it might append is left out."""
        bos = self._tok.bos_token_id
        plain, marked = (self._tok("a", add_special_tokens=add).input_ids for add in (False, True))
        return [bos] if bos is not None and plain[:1] != [bos] and marked[:1] == [bos] else []

    def encode(self, text: str) -> list[int]:
        return self._prefix + list(self._tok(text, add_special_tokens=False, verbose=False).input_ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tok.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def chat(self, user: str, earlier: Sequence[tuple[str, str]] = ()) -> list[int]:
        if not self.has_chat:
            return self.encode(user)
        messages = [
            {"role": role, "content": text}
            for pair in earlier
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
        messages.append({"role": "user", "content": user})
        return list(self._tok.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


class ByteTokenizer:
    """UTF-8 bytes as ids 0-255 and EOS as 256, for random toy models: no files, no training, any text goes through.

    Ids from 256 on (EOS, and the padding of a wider toy model) decode to nothing; broken UTF-8 to U+FFFD.

    >>> ByteTokenizer().encode("hé")
    [104, 195, 169]
    """

    EOS = 256

    def __init__(self) -> None:
        self.eos_ids = frozenset({self.EOS})
        self.vocab_size = self.EOS + 1
        self.has_chat = False
        self.digest = vocab_digest({f"<0x{byte:02X}>": byte for byte in range(256)} | {"<eos>": self.EOS})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < self.EOS).decode(errors="replace")

    def chat(self, user: str, earlier: Sequence[tuple[str, str]] = ()) -> list[int]:
        return self.encode(user)
