"""What a process computes once and several tests use: the values of caches, and fixtures of a wider
scope than a test. Coverage would note their lines for the first of these tests alone.
"""

import contextlib
import functools
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TEST = "TINYLLAMA_TEST"  # in the environment: the test that started a process, or a context


class Contexts:
    """Coverage's contexts: a test's name, or that of something shared, whose lines are noted once.

    uses: by context, the shared ones that it has used.
    """

    def __init__(self, coverage: Any) -> None:
        self.coverage, self.uses = coverage, defaultdict[str, set[str]](set)
        self._now = [""]

    @contextlib.contextmanager
    def within(self, context: str) -> Iterator[None]:
        """What runs here, and in processes that it starts, is noted for this context. Another
        thread's is noted for the main thread's."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._enter(context, self._now.append)
        try:
            yield
        finally:
            self._now.pop()
            self._enter(self._now[-1])

    def _enter(self, context: str, *then: Callable[[str], None]) -> None:
        self.coverage.switch_context(context)
        os.environ[TEST] = context
        for one in then:
            one(context)

    def use(self, shared: str) -> None:
        self.uses[self._now[-1]].add(shared)

    def users(self) -> dict[str, list[str]]:
        """By shared context, the contexts that have used it, or one that has used it, and so on."""
        found = defaultdict[str, set[str]](set)
        for context in list(self.uses):
            left, seen = [context], {context}
            while left:
                new = self.uses.get(left.pop(), set()) - seen
                seen |= new
                left += new
            for shared in seen - {context}:
                found[shared].add(context)
        return {shared: sorted(some) for shared, some in found.items()}

    def of_caches(self) -> None:
        """From now on `functools` makes caches of the tree's functions whose values are shared
        contexts, one for each arguments."""
        plain, contexts = functools.lru_cache, self

        def lru_cache(maxsize: Any = 128, typed: bool = False) -> Any:
            if callable(maxsize):
                return self._noted(maxsize, plain)
            return lambda function: self._noted(function, plain(maxsize, typed))

        class Property(functools.cached_property):
            def __get__(self, instance: Any, owner: Any = None) -> Any:
                if instance is None:
                    return self
                shared = f"{self.func.__module__}.{self.func.__qualname__} {id(instance)}"
                contexts.use(shared)
                kept = vars(instance)
                if self.attrname not in kept:
                    with contexts.within(shared):
                        return super().__get__(instance, owner)
                return kept[self.attrname]

            # With these two Python asks for each read, not for the first alone.
            def __set__(self, instance: Any, value: Any) -> None:
                vars(instance)[self.attrname] = value

            def __delete__(self, instance: Any) -> None:
                del vars(instance)[self.attrname]

        vars(functools).update(
            lru_cache=lru_cache, cache=lru_cache(maxsize=None), cached_property=Property
        )

    def _noted(self, function: Any, cache: Callable[[Any], Any]) -> Any:
        """The cache of a function of the tree, which tells what is used and what is computed."""
        module = sys.modules.get(getattr(function, "__module__", ""))
        if not str(getattr(module, "__file__", "")).startswith(f"{ROOT}/"):
            return cache(function)

        def shared(args: Any, kwargs: Any) -> str:
            given = hash((args, *sorted(kwargs.items())))
            return f"{function.__module__}.{function.__qualname__} {given}"

        @functools.wraps(function, updated=())
        def computed(*args: Any, **kwargs: Any) -> Any:
            with self.within(shared(args, kwargs)):
                return function(*args, **kwargs)

        cached = cache(computed)

        @functools.wraps(function, updated=())
        def used(*args: Any, **kwargs: Any) -> Any:
            self.use(shared(args, kwargs))
            return cached(*args, **kwargs)

        names = ("cache_clear", "cache_info", "cache_parameters")
        vars(used).update({name: getattr(cached, name) for name in names})
        return used
