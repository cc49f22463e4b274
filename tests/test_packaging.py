"""What a wheel holds, and that importing needs neither CUDA nor the repository."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tracked sources, so that the repository stays as it is."""
    work = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "bench/", "docs/")):
            target = work / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(work), "."]
    subprocess.run(command, cwd=work / "source", check=True)
    (built,) = work.glob("*.whl")
    return built


@pytest.mark.timeout(180)
def test_a_wheel_holds_kernels_and_layouts_inside_the_package_and_nothing_at_the_top(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"tide_triton", next(top for top in tops if top.endswith(".dist-info"))}
    for name in ("kernels/__init__.py", "layouts/slots.py", "fsdp/attachment.py", "demo/__init__.py", "py.typed"):
        assert f"tide_triton/{name}" in names
    sources = {
        f"tide_triton/{package}{path.name}"
        for package, folder in (("", "tide_triton"), ("kernels/", "kernels"), ("layouts/", "layouts"))
        for path in (ROOT / folder).glob("*.py")
    }
    assert sources <= set(names)


def test_kernels_and_layouts_import_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = (
        "import tide_triton.kernels, tide_triton.layouts, sys; "
        "print(tide_triton.kernels.__file__); "
        "assert 'kernels' not in sys.modules and 'layouts' not in sys.modules; "
        "assert not any(name.startswith(('cuda.', 'nccl', 'nvshmem')) for name in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(tmp_path / "site"))


def test_layouts_import_without_torch() -> None:
    program = "import sys, tide_triton, tide_triton.layouts; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_importing_changes_no_environment_variable() -> None:
    program = (
        "import os; before = dict(os.environ); "
        "import tide_triton.kernels, tide_triton.fsdp, tide_triton.collectives; "
        "changed = {k for k in {*before, *os.environ} if before.get(k) != os.environ.get(k)}; "
        "assert not {k for k in changed if 'TRITON' in k or 'TIDE' in k or 'NCCL' in k}, changed"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
