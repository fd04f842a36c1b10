"""Where run files are looked for. Nothing but the standard library, so that a script without numpy can say what it lacks."""
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_files_in(*folders):
    """Paths of the run files in these folders, as text; without any the script ends with a message."""
    paths = [str(path) for folder in folders for path in sorted((ROOT / folder).glob("*.h5"))]
    if not paths:
        names = ", ".join(str(folder).removeprefix(f"{ROOT}/") for folder in folders)
        sys.exit(f"{Path(sys.argv[0]).name}: no run files in {names}. They are not in the repository: why.md of the experiment has the commands that make them, "
                 "and what is kept of them are the tables beside it, of which figures are drawn")
    return paths
