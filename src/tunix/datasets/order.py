"""An endless, seeded order over a dataset by index, so that its state is one position."""

from __future__ import annotations

from tunix.errors import DataError


class ShuffledOrder:
    """Position i is a function of (seed, i) alone; a pass holds every item once, shuffled anew."""

    def __init__(self, size: int, seed: int):
        import grain  # here, since it takes longer to import than all the rest of this layer

        if size == 0:
            raise DataError("the dataset is empty")
        self.size = size
        self._order = grain.MapDataset.range(size).seed(seed).shuffle().repeat()

    def __getitem__(self, position: int) -> tuple[int, int]:
        """Return the index of the item at a position, and the pass (epoch) that it falls in."""
        index = self._order[position]
        assert index is not None  # a range holds no gaps
        return int(index), position // self.size
