"""What MkDocs adds to the pages of docs/ so that they link as they do on GitHub.

README.md is the front page, and CONTRIBUTING.md and CHANGELOG.md are pages. A file of
the repository that a page links to, such as an example, becomes a page that shows it.
"""

import posixpath
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
AT_THE_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
LINK = re.compile(r"(?<=\]\()(?!https?://|#)([^)#\s]+)")
# What users look for is rarely in internals; other pages mention what these are about.
BOOSTS = {"internals/": 0.3, "CHANGELOG": 0.3, "storage": 2, "performance": 1.5}
# A line of code, of up to 88 characters, fits a window of 1280 pixels.
STYLE = """.md-typeset pre > code { font-size: 0.61rem; }
"""
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".yml": "yaml"}


def on_config(config: Any) -> Any:
    """Link the repository that pyproject.toml names, and each page's source in it."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    if repository := project.get("urls", {}).get("Repository"):
        config.repo_url, config.edit_uri = repository, "edit/main/docs/"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages at the root, and the files that pages link to."""
    files.append(File.generated(config, "assets/style.css", content=STYLE))
    files.append(File.generated(config, "commands.md", content=commands_page()))
    for path, uri in AT_THE_ROOT.items():
        files.append(File.generated(config, uri, content=read(path)))
    pages = [(path, read(path)) for path in AT_THE_ROOT]
    pages += [
        (f"docs/{file.src_uri}", file.content_string)
        for file in files.documentation_pages()
        if file.generated_by is None
    ]
    linked = {target for path, text in pages for target in targets(path, text)}
    for path in sorted(linked):
        if uri_of(path) not in files.src_uris and (ROOT / path).is_file():
            files.append(
                File.generated(
                    config,
                    uri_of(path),
                    content=show(path),
                    inclusion=InclusionLevel.NOT_IN_NAV,
                )
            )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn the links of a page to where the site has what they name."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        page.meta["search"] = {"exclude": True}
        return markdown
    for start, boost in BOOSTS.items():
        if uri.startswith(start):
            page.meta["search"] = {"boost": boost}
    for path, own in AT_THE_ROOT.items():
        if own == uri:
            return relink(path, uri, markdown)
    return relink(f"docs/{uri}", uri, markdown)


def commands_page() -> str:
    """The help of every command, from the parser itself."""
    sys.path.insert(0, str(ROOT))
    from jaxkv.tools.commands import load_usages

    texts = ["# Commands\n", "`jaxkv COMMAND --help` prints these pages.\n"]
    for name, usage in load_usages().items():
        texts.append(f"## jaxkv {name}\n\n```text\n{usage.help}\n```\n")
    return "\n".join(texts)


def relink(path: str, uri: str, markdown: str) -> str:
    """Replace the links of a file of the repository by those of its page."""
    folder = posixpath.dirname(uri)

    def turned(link: re.Match[str]) -> str:
        return posixpath.relpath(uri_of(resolved(path, link[1])), folder)

    return LINK.sub(turned, markdown)


def targets(path: str, markdown: str) -> set[str]:
    """The files of the repository that a file links to, from its root."""
    return {resolved(path, link) for link in LINK.findall(markdown)}


def resolved(path: str, link: str) -> str:
    """Where in the repository a link of a file leads."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def uri_of(path: str) -> str:
    """The page that shows a file of the repository."""
    if path in AT_THE_ROOT:
        return AT_THE_ROOT[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}.md"


def show(path: str) -> str:
    """A page with the text of a file."""
    text = read(path)
    language = LANGUAGES.get(posixpath.splitext(path)[1], "text")
    return f"# {path}\n\n````{language}\n{text.rstrip()}\n````\n"


def read(path: str) -> str:
    """The text of a file of the repository."""
    return (ROOT / path).read_text(encoding="utf-8")
