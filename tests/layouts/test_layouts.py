"""The package as a whole: what it exports, and what importing it costs."""

import subprocess
import sys

from tide_triton import layouts


def test_every_exported_name_exists_and_is_listed_in_order() -> None:
    assert all(hasattr(layouts, name) for name in layouts.__all__)
    constants_then_classes_then_functions = sorted(
        layouts.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name)
    )
    assert layouts.__all__ == constants_then_classes_then_functions


def test_importing_layouts_needs_neither_torch_nor_numpy() -> None:
    script = "import sys, tide_triton.layouts; print(sorted({'torch', 'numpy', 'triton'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"
