"""Supervised rows of any number: a first pass keeps numbers, a row is encoded anew when drawn."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import Int, Int32, UInt64

from tunix.datasets.chats import Columns, Example, RowEncoder, marked_text
from tunix.datasets.rows import Rows
from tunix.errors import DataError, nearest


@dataclass(frozen=True)
class Survey:
    """What a first pass over the rows found: 16 bytes a row, whatever its size."""

    lengths: Int32[np.ndarray, " rows"]
    """Tokens before cutting."""
    trained: Int32[np.ndarray, " rows"]
    """Trained tokens that are left; 0 where the row is dropped."""
    keys: UInt64[np.ndarray, " rows"]
    """Hash of the tokens that are left; 0 where the row is dropped."""


@dataclass(frozen=True)
class Examples:
    """Chosen rows, by index; each is read and encoded when it is asked for."""

    rows: Rows
    encoder: RowEncoder
    survey: Survey
    chosen: Int[np.ndarray, " chosen"]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Example:
        row = int(self.chosen[index])
        where = self.rows.where(row)
        example = self.encoder.fit(self.encoder.encode(self.rows[row], where), where)
        if example is None or content_key(example) != self.survey.keys[row]:
            raise DataError(f"{where} is not what it was when the run began; was the file changed?")
        return example


def survey_rows(rows: Rows, encoder: RowEncoder) -> Survey:
    """Encode every row once, for what must be known before the first is drawn.

    Raises:
        DataError: a row that cannot be used, a column by a name of one's own that no row has, or
            no row left; names where.
    """
    lengths, trained = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int32)
    keys = np.zeros(len(rows), np.uint64)
    columns: set[str] = set()
    for i in range(len(rows)):
        where, row = rows.where(i), rows[i]
        columns |= row.keys()
        whole = encoder.encode(row, where)
        lengths[i] = len(whole.tokens)
        example = encoder.fit(whole, where)
        if example is not None:
            trained[i], keys[i] = example.action_mask.sum(), content_key(example)
    _check_named(encoder.columns, columns)
    if not trained.any():
        raise DataError(
            f"the dataset is empty: no row to train on ({len(rows)} dropped as too long)"
        )
    return Survey(lengths, trained, keys)


def _check_named(columns: Columns, found: set[str]) -> None:
    default = asdict(Columns())
    for part, column in asdict(columns).items():
        if found and column != default[part] and column not in found:
            raise DataError(
                f"{part}_field: no row has a column {column!r}; they have {sorted(found)}"
                f"{nearest(column, found)}"
            )


def content_key(example: Example) -> np.uint64:
    """Hash of an example's tokens; never 0."""
    digest = hashlib.blake2b(example.tokens.tobytes(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little") or 1)


def hold_out(
    survey: Survey, fraction: float, most: int, seed: int
) -> tuple[Int[np.ndarray, " training"], Int[np.ndarray, " held_out"]]:
    """Split the usable rows' indices into (training, held-out) at random.

    Rows with equal tokens never stand on both sides, so nothing evaluated was trained on; further
    copies of a held-out row are left out. Nothing is held out where nothing would be left to train.
    """
    usable = np.flatnonzero(survey.trained)
    room = min(most, int(fraction * len(usable)))
    held_out = np.random.default_rng(seed).permutation(len(usable))[:room]
    copies = np.isin(survey.keys[usable], survey.keys[usable[held_out]])
    if copies.all():
        return usable, usable[:0]
    return usable[~copies], usable[held_out]


def describe(survey: Survey, encoder: RowEncoder) -> str:
    """Say in one line how many rows and tokens there are and how long rows are, before cutting."""
    used = survey.trained > 0
    tokens = np.minimum(survey.lengths[used], encoder.max_tokens).sum(dtype=np.int64)
    middle, high = np.percentile(survey.lengths, [50, 95], method="inverted_cdf")
    text = (
        f"{used.sum()} rows, {tokens} tokens, {survey.trained.sum(dtype=np.int64)} trained; "
        f"row length min {survey.lengths.min()}, median {middle}, p95 {high}, "
        f"max {survey.lengths.max()}"
    )
    cut = int((used & (survey.lengths > encoder.max_tokens)).sum())
    dropped = int((~used).sum())
    if cut or dropped:
        text += f"; over {encoder.max_tokens} tokens: {cut} cut, {dropped} dropped"
    return text


def first_row(examples: Examples) -> str:
    """Show the first row, what is trained of it within double square brackets."""
    tokenizer = examples.encoder.policy.tokenizer
    assert tokenizer is not None  # or the row could not have been encoded
    return marked_text(tokenizer, examples[0])
