"""Resolves the dependencies, those of all extras included, for each version of Python that the package names.

pip does this without the interpreters: it reads the wheels' metadata, and installs nothing. Conditions on `python_version`
inside other packages are judged by the version that runs pip.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13", "3.14")


def main() -> int:
    """Print a line for each version; 1 where one cannot be resolved."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    together = [*project["dependencies"], *(one for extra in extras.values() for one in extra)]
    requirements = [one for one in together if not one.startswith("kernelwright")]
    failed = False
    for version in VERSIONS:
        problem = unresolved(version, requirements)
        failed |= problem is not None
        print(f"Python {version}: {problem or 'resolved'}", flush=True)
    return int(failed)


def unresolved(version: str, requirements: list[str]) -> str | None:
    """Why pip cannot resolve the requirements for a version of Python; None where it can."""
    with tempfile.TemporaryDirectory() as nowhere:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--disable-pip-version-check"]
        command += ["--only-binary=:all:", "--python-version", version, "--target", nowhere, *requirements]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    errors = re.findall(r"^ERROR: (.*)", done.stderr, re.MULTILINE)
    return None if done.returncode == 0 else "; ".join(errors) or done.stderr.strip()[-300:]


if __name__ == "__main__":
    sys.exit(main())
