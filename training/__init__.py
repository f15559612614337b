"""What a training script imports beside environments. Nothing here knows an algorithm."""

import sys
from pathlib import Path

# In a wheel the scripts are a package. With python -m training.scripts.omg_iql they still import each other by name.
_scripts = Path(__file__).parent / "scripts"
if sys.argv[:1] == ["-m"] and _scripts.is_dir():
    sys.path.append(str(_scripts))
