"""Whether a file can be written, found out before the work whose results it is for."""

from pathlib import Path


def require_writable(path: Path) -> None:
    """Raise ValueError, saying why, where `path` cannot be written. Leaves the file system as it was."""
    existed = path.exists()
    try:
        # Asking the permissions is not enough: root has them all, even on what is read-only.
        with path.open("ab"):
            pass
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
    if not existed:
        path.unlink()


def require_plottable(path: Path) -> None:
    """Raise ValueError where `path` cannot be written, or does not end in a format that matplotlib draws."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    formats = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in formats:
        raise ValueError(f"cannot draw {path}: its name must end in one of .{', .'.join(formats)}")
    require_writable(path)
