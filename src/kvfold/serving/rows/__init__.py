"""How the rows that are being generated lie in memory: in one cache, or each in its own."""

from kvfold.serving.rows.apart import RowsApart
from kvfold.serving.rows.base import Rows
from kvfold.serving.rows.together import RowsTogether

__all__ = ["Rows", "RowsApart", "RowsTogether"]
