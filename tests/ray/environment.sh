#!/usr/bin/env bash
# environment.sh PYTHON FOLDER VENV: an environment in FOLDER with Ray, on top of VENV, whose packages it sees.
set -euo pipefail
python=$1 folder=$2 below=$3
"$python" -m venv "$folder"
"$folder/bin/python" -m pip --disable-pip-version-check install --progress-bar off -r "$(dirname "$0")/requirements.txt"
site=$("$folder/bin/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")
under=$(cd "$below" && bin/python -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")
echo "import site; site.addsitedir('$under')" > "$site/below.pth"
