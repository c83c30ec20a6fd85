"""Packages for a machine with a GPU that cannot reach an index: FlashAttention-4 and its needs.

`make gpu-wheels` downloads their wheels to the folder gpu-wheels. It lets this module compress them
again, and compiles FlashAttention-4's kernels into gpu-wheels/cache. On the machine with the GPU,
the first step of `make gpu` installs the wheels in gpu-wheels/site.

    python -m tests.tools.wheels pack FOLDER      # compress the wheels of a folder
    python -m tests.tools.wheels install FOLDER   # install them in FOLDER/site
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path


def environment(folder):
    """Return environment variables that name the installed packages and the compiled kernels."""
    site = Path(folder).absolute() / "site"
    # A file of nvidia-cutlass-dsl adds the second path, but only in Python's own environment.
    paths = [site, site / "nvidia_cutlass_dsl/dsl_packages"]
    return {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(site.with_name("cache")),
    }


def pack(folder):
    """Compress each wheel with LZMA, which pip can read. Print its bytes before and after."""
    for wheel in sorted(Path(folder).glob("*.whl")):
        packed, before = wheel.with_suffix(".new"), wheel.stat().st_size
        with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(packed, "w") as new:
            for entry in old.infolist():
                content = old.read(entry)
                entry.compress_type = zipfile.ZIP_LZMA
                new.writestr(entry, content)
        packed.replace(wheel)
        print(f"{wheel.name}: {before} -> {wheel.stat().st_size} bytes", flush=True)


def install(folder):
    """Install the wheels without an index, and import FlashAttention-4 if it is among them."""
    wheels = [str(x) for x in sorted(Path(folder).glob("*.whl"))]
    site = Path(folder) / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(site)]
    subprocess.run([*pip, *wheels], check=True)
    print("\n".join(sorted(x.name for x in site.glob("*.dist-info"))), flush=True)
    if (site / "flash_attn").is_dir():
        code = "import flash_attn.cute.interface as x; print(x.__file__)"
        paths = [environment(folder)["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]
        found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        subprocess.run([sys.executable, "-c", code], check=True, env=found)


if __name__ == "__main__":
    {"pack": pack, "install": install}[sys.argv[1]](sys.argv[2])
