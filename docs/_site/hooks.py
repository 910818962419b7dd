"""Hooks: pages of the site that are files of the repository outside of `docs/`.

Law: a text is written once. Contributing, changes and examples are shown as they are in the repository, and links
between them and the pages lead to the same place here and there.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = {"contributing.md": "CONTRIBUTING.md", "changes.md": "CHANGELOG.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in `docs/`."""
    root = Path(config.config_file_path).parent
    for page, name in PAGES.items():
        text = (root / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=re.sub(r"\]\(docs/", "](", text)))
    for script in sorted((root / "examples").rglob("*.py")):
        text = script.read_text(encoding="utf-8")
        content = f"---\nsearch:\n  boost: 0.5\n---\n# {script.relative_to(root)}\n\n```python\n{text}```\n"
        files.append(File.generated(config, f"{script.relative_to(root)}.md", content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to scripts lead to their pages."""
    return re.sub(r"\]\(\.\./(examples/[\w/]+\.py)\)", r"](\1.md)", markdown)
