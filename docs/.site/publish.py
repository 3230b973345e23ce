"""How pages say to install jaxkv: from a clone, or from the package index.

pyproject.toml says whether it is published. `python docs/.site/publish.py` rewrites the
pages accordingly, which `tests/test_docs.py` checks.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# An extra, except in `pip install -e`, which needs a clone.
EXTRA = re.compile(r'(?<!-e )"(?:\.|jaxkv)\[(\w+)\]"')
# Each in a clone, and from the index.
PHRASES = (
    ("pip install .  # in a checkout of jaxkv; it", "pip install jaxkv  # it"),
    ('NVIDIA GPUs, "." for CPU', 'NVIDIA GPUs, "jaxkv" for CPU'),
    ("In a clone of this repository, with Python", "With Python"),
    ("`pip install`, in a clone |", "`pip install` |"),
    ("# in a clone\nJAXKV_RECORD", "# once\nJAXKV_RECORD"),
)


def is_published() -> bool:
    """Say whether the package index has jaxkv."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        return bool(tomllib.load(file)["tool"]["jaxkv"]["published"])


def rewrite(text: str, published: bool) -> str:
    """Return a page that installs jaxkv from the index, or from a clone."""
    text = EXTRA.sub(r'"jaxkv[\1]"' if published else r'".[\1]"', text)
    for clone, index in PHRASES:
        text = text.replace(clone, index) if published else text.replace(index, clone)
    return text


def main() -> None:
    """Rewrite the pages, and print which have changed."""
    published = is_published()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        if (new := rewrite(text, published)) != text:
            path.write_text(new, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
