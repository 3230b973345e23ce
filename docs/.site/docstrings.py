"""What Griffe, which reads the docstrings, has to know of jaxkv's."""

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
