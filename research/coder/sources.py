"""`python -m research coder_sources`: fetch the packages from which the coder's prompts are cut.

`sources.tsv` names them: language, registry, package, version, licence, and whether the package is held out.
All licences are permissive. A package is fetched by its registry's ordinary client and unpacked into
OUT/LANGUAGE/PACKAGE, never installed or run; one that is there already is skipped.
"""

import csv
import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from medusa_jax.commands.flags import CommandLine, flag
from medusa_jax.console import inform
from medusa_jax.errors import UserError

TABLE = Path(__file__).with_name("sources.tsv")
DEBIAN = Path("/etc/apt/sources.list.d/debian.sources")


@dataclass(frozen=True)
class Source:
    """A row of the table.

    Attributes:
      registry: "pypi", "npm", "deb" (a binary package with sources in it) or "deb-src".
      held_out: "yes" if nothing of it may be trained on, else "".
    """

    language: str
    registry: str
    package: str
    version: str
    licence: str
    held_out: str

    @property
    def folder(self) -> Path:
        return Path(self.language, self.package)


def read_table() -> list[Source]:
    """All sources, in the order of the table."""
    with open(TABLE) as file:
        return [Source(**row) for row in csv.DictReader(file, delimiter="\t")]


def download(source: Source, into: Path) -> None:
    """Fetch the archives of one package.

    Raises:
      CalledProcessError: its version has left the registry.
    """
    name, version = source.package, source.version
    if source.registry == "pypi":
        command = [
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary",
            ":all:",
            "-d",
            ".",
        ]
        command.append(f"{name}=={version}")
    elif source.registry == "npm":
        command = ["npm", "pack", "-s", f"{name}@{version}"]
    elif source.registry == "deb":
        command = ["apt-get", "download", "-q", f"{name}={version}"]
    else:
        command = ["apt-get", *source_options(into.parent)]
        command += ["source", "-q", "--download-only", f"{name}={version}"]
    subprocess.run(command, cwd=into, check=True, stdout=subprocess.DEVNULL)


def source_options(folder: Path) -> list[str]:
    """Options by which apt reads source packages, with a separate state in `folder`."""
    apt = folder / "apt"
    listed = apt / "debian.sources"
    options = {
        "Dir::Etc::sourcelist": listed,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": apt / "lists",
        "Dir::Cache": apt / "cache",
    }
    args = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
    if not listed.exists():
        (apt / "lists" / "partial").mkdir(parents=True)
        (apt / "cache" / "archives" / "partial").mkdir(parents=True)
        listed.write_text(DEBIAN.read_text().replace("Types: deb\n", "Types: deb-src\n"))
        subprocess.run(["apt-get", *args, "-q", "update"], check=True)
    return args


def unpack(archive: Path, into: Path) -> None:
    """Unpack an archive of any of the registries; others (signatures) are passed over."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(into)
    elif archive.suffix == ".deb":
        subprocess.run(["dpkg", "-x", archive, into], check=True)
    elif ".debian." not in archive.name and tarfile.is_tarfile(archive):
        with tarfile.open(archive) as tar:
            tar.extractall(into, filter="data")


@contextmanager
def complete_or_absent(folder: Path) -> Iterator[Path]:
    """A new folder that gets its name at the end."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as new:
        content = Path(new) / "content"
        content.mkdir()
        yield content
        os.replace(content, folder)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Fetch the packages of research/coder/sources.tsv."""

    out: str = flag("directory for their files", "work/coder/sources")


def run(flags: Flags) -> int:
    """Fetch what is not there yet."""
    out = Path(flags.out).absolute()
    todo = [source for source in read_table() if not (out / source.folder).exists()]
    if any(shutil.which(client) is None for client in ("pip", "npm", "apt-get", "dpkg")):
        raise UserError("needs pip, npm, apt-get and dpkg")
    lost = []
    for source in todo:
        with (
            tempfile.TemporaryDirectory() as folder,
            complete_or_absent(out / source.folder) as content,
        ):
            archives = Path(folder) / "archives"
            archives.mkdir()
            try:
                download(source, archives)
            except subprocess.CalledProcessError:
                lost.append(f"{source.package} {source.version}")
            for archive in sorted(archives.iterdir()):
                unpack(archive, content)
    inform(f"{len(todo) - len(lost)} packages fetched into {out}")
    if lost:
        raise UserError(f"no longer in their registry: {', '.join(lost)}")
    return 0


main = CommandLine("python -m research coder_sources", Flags, run, "")
