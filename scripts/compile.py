"""Compile what is hot of a copy of the package to machine code: `python scripts/compile.py COPY/sumibi`.

Machine code goes beside the sources it was made from; so never into the tree that is edited.
The compiler is mypyc: what is compiled is the same typed Python, and runs uncompiled everywhere else. It
needs a C compiler. `make compiled` calls this.

Compiled is every module of the packages below, but those with keywords in a class statement (mypyc drops
them, and with them the tags and options of a `msgspec.Struct`) and a few that gain nothing.
"""

import ast
import os
import shutil
import sys
import tempfile
from pathlib import Path

PACKAGES = (
    *("core", "routing", "routing/policies", "prompts", "prompts/dialects", "sim"),
    *("gateway", "gateway/epp"),
)
LEFT = frozenset(
    (
        "core/errors.py",
        "prompts/cuts.py",
        "prompts/llama.py",
        "prompts/samples.py",
        "prompts/template.py",
        *(
            f"gateway/{name}.py"
            for name in (
                "admin",
                "allowed",
                "exposition",
                "main",
                "options",
                "record",
                "server",
                "assembly",
                "sidecar",
                "stopping",
                "supervision",
            )
        ),
        *(
            f"gateway/epp/{name}.py"
            for name in (
                "endpoints",
                "exposition",
                "kubeapi",
                "main",
                "options",
                "pods",
                "servicer",
                "tls",
                "wire",
            )
        ),
    )
)
"""Nothing that happens once for each request, or that would be quicker."""


def keywords(source: str) -> bool:
    """Whether a module has a class statement with keywords."""
    return any(isinstance(node, ast.ClassDef) and node.keywords for node in ast.walk(ast.parse(source)))


def modules(package: Path) -> list[str]:
    """What is to be compiled, as paths below `package`."""
    found = [path for name in PACKAGES for path in sorted((package / name).glob("*.py"))]
    names = [
        str(path.relative_to(package))
        for path in found
        if path.name != "__init__.py" and not keywords(path.read_text(encoding="utf-8"))
    ]
    return [name for name in names if name not in LEFT]


def build(package: Path, configuration: Path, scratch: Path) -> None:
    """Compile in a copy, and put what comes out beside the sources it was made from."""
    from mypyc.build import mypycify
    from setuptools import setup

    tree = scratch / "src" / "sumibi"
    shutil.copytree(package, tree, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(configuration, scratch)
    os.chdir(scratch)
    arguments = ["--config-file=pyproject.toml", *(f"src/sumibi/{name}" for name in modules(tree))]
    level = os.environ.get("SUMIBI_COMPILE_LEVEL", "3")
    extensions = mypycify(arguments, opt_level=level, multi_file=True, verbose=False)
    setup(
        name="sumibi-compiled",
        packages=[],
        ext_modules=extensions,
        script_args=["--quiet", "build_ext", "--build-lib", "out", "--parallel", str(os.cpu_count() or 1)],
    )
    for old in package.rglob("*.so"):
        old.unlink()
    for made in (scratch / "out").rglob("*.so"):
        target = package.parent / made.relative_to(scratch / "out")
        shutil.copy(made, target)


def main() -> int:
    """Compile; the exit status is 0 if it worked."""
    package = Path(sys.argv[1]).resolve()
    if not (package / "routing" / "router.py").exists():
        print(f"{package}: no copy of the sumibi package", file=sys.stderr)
        return 2
    configuration = Path(__file__).resolve().parent.parent / "pyproject.toml"
    with tempfile.TemporaryDirectory() as scratch:
        build(package, configuration, Path(scratch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
