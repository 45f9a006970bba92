#!/usr/bin/env bash
# environment.sh PYTHON FOLDER PACKAGES...: an environment in FOLDER with vLLM for CPUs (3.5 GB) and these packages, editable.
set -euo pipefail
python=$1 folder=$2
shift 2
"$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install --progress-bar off -r "$(dirname "$0")/requirements.txt"
# Those that come along are for CUDA: with torch for CPUs, importing transformers would end in an error.
"${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec
# The command `vllm` asks for the metadata of a distribution of that name.
site=$("$folder/bin/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")
named="$site/vllm-0.32.0+cpu.dist-info"
mkdir -p "$named"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$named/METADATA"
: > "$named/RECORD"
for package in "$@"; do
    "${pip[@]}" install --quiet --no-deps --no-build-isolation -e "$package"
done
