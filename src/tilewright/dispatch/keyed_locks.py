"""A lock for each thing that is made: what is the same is made once, what differs side by side."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Hashable, Iterator

from tilewright.fakes import traces_here


class KeyedLocks:
    """Locks by key, which exist while a thread holds them or waits for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[Hashable, threading.RLock] = {}
        self._users: Counter[Hashable] = Counter()

    @contextlib.contextmanager
    def holding(self, key: Hashable) -> Iterator[None]:
        """Inside, no other thread holds the key; this one may hold it again.

        A thread that traces waits for nobody, since whoever holds the key may wait for that trace:
        what it makes may be made twice.
        """
        if traces_here():
            yield
            return
        with self._lock:
            lock = self._locks.setdefault(key, threading.RLock())
            self._users[key] += 1
        try:
            with lock:
                yield
        finally:
            with self._lock:
                self._users[key] -= 1
                if not self._users[key]:
                    del self._users[key], self._locks[key]
