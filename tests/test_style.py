import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def ruff(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "ruff", *arguments, "."], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_lint():
    result = ruff("check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_format():
    result = ruff("format", "--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_continuous_integration_runs_the_command_of_the_readme():
    command = 'pip install -e ".[test]" && pytest'
    assert command in (ROOT / "README.md").read_text()
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == command
