"""What Griffe, which reads the docstrings, has to know of jaxkv's."""

import inspect
import pydoc
import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Takes a section `Example:` for one of doctests, as `Examples:` is."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section."""
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", text)


class Settings(griffe.Extension):
    """Takes the docstrings to which `settings.documented` has added the fields."""

    def on_class_instance(self, *, cls: griffe.Class, **_: Any) -> None:
        """Replace the docstring in the source by that of the class."""
        if any(str(each.value) == "settings.documented" for each in cls.decorators):
            cls.docstring.value = inspect.getdoc(pydoc.locate(cls.path))
