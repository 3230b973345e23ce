"""What has to be closed, as a context."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import Self


class Closing(abc.ABC):
    """Closes at the end of a ``with`` statement, however that ends."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give up what is held; no calls after this."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
