"""Modules that an engine imports and that loading and running its drafters does not need, made on the spot."""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import ClassVar
from unittest.mock import MagicMock


class _Stub(types.ModuleType):
    """Any capitalised name is a class, any other one a mock."""

    __path__: ClassVar[list[str]] = []
    __all__: ClassVar[list[str]] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {}) if name[0].isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        pass


def stub(*packages):
    """Make packages importable that are not installed; installed ones stay."""
    sys.meta_path.append(_Finder(packages))
