"""`python -m training.play`, by the name that it had: this stays for one version."""

import runpy

if __name__ == "__main__":
    runpy.run_module("training.play", run_name="__main__", alter_sys=True)
