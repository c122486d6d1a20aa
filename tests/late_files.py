"""A plugin for workers of xdist: each imports the files of tests that it runs when it runs them, not all files."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest


class LateFile(pytest.Item):
    """Stands for a file's tests, from the collection until the file's turn comes."""

    def runtest(self) -> None:
        """Never: the file's tests run in its place."""
        raise NotImplementedError


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> LateFile | None:
    """In the place of the file, which a process that runs alone imports as usual."""
    if not hasattr(parent.config, "workerinput"):
        return None
    nodeid = module_path.relative_to(parent.config.rootpath).as_posix()
    return LateFile.from_parent(parent, name=module_path.name, path=module_path, nodeid=nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Import the file and run its tests."""
    if not isinstance(item, LateFile):
        return None
    session = item.session
    gc.disable()  # it would search all that was imported again and again
    tests = list(session.genitems(pytest.Module.from_parent(item.parent, path=item.path)))
    item.config.hook.pytest_collection_modifyitems(session=session, config=item.config, items=tests)
    gc.enable()
    index = session.items.index(item)
    for test, following in zip(tests, [*tests[1:], nextitem], strict=False):
        session.items[index] = test  # xdist reports the test that stands there
        item.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
    if not tests:
        session._setupstate.teardown_exact(nextitem)
    return True
