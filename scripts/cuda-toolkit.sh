#!/usr/bin/env bash
# cuda-toolkit.sh 12|13 FOLDER: put a CUDA compiler into FOLDER, touching nothing else of the machine.
#
#   13   CUDA 13.0 from PyPI, 100 MB to download
#   12   CUDA 12.4 unpacked from Debian's packages, 1 GB to download: what PyPI has of CUDA 12 lacks
#        nvcc and its front end. Needs apt-get and dpkg-deb and Debian's keyring, not root.
#
# FOLDER then looks like an installed toolkit: bin, include, lib64, nvvm.
set -euo pipefail
major=${1:?usage: cuda-toolkit.sh 12|13 FOLDER}
folder=${2:?usage: cuda-toolkit.sh 12|13 FOLDER}
python=${PYTHON:-python3}
[ -x "$folder/bin/nvcc" ] && exit 0
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT

cuda_13() {
  # The oldest 13 asks for the oldest driver.
  "$python" -m pip install --quiet --no-deps --target "$parts" nvidia-cuda-nvcc==13.0.88 \
    nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96
  cp -a "$parts/nvidia/cu13/." "$folder"
  ln -sfn lib "$folder/lib64" # where nvcc looks
}

unpack() { # PACKAGE PATTERN...
  local package=$1
  shift
  dpkg-deb --fsys-tarfile "$parts/$package"_*.deb | tar x -C "$parts/unpacked" --wildcards "$@"
}

cuda_12() {
  mkdir -p "$parts/lists/partial" "$parts/archives/partial"
  : >"$parts/status"
  chmod -R a+rX "$parts"
  # Debian trixie's, whatever release this machine runs, from the mirror that it uses, under an apt
  # state of their own.
  local mirror
  mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' | grep -m 1 '/debian/*$' || true)}
  [ -n "$mirror" ] || {
    echo "cuda-toolkit.sh: apt knows no Debian mirror; set DEBIAN_MIRROR to the address of one" >&2
    exit 1
  }
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie non-free" \
    >"$parts/sources.list"
  apt=(apt-get -qq -o "Dir::Etc::sourcelist=$parts/sources.list"
    -o Dir::Etc::sourceparts=/dev/null -o Dir::Etc::preferencesparts=/dev/null
    -o "Dir::State::lists=$parts/lists" -o "Dir::State::status=$parts/status"
    -o "Dir::Cache=$parts" -o "APT::Sandbox::User=$(id -un)")
  "${apt[@]}" update
  (cd "$parts" && "${apt[@]}" download nvidia-cuda-toolkit nvidia-cuda-dev)
  mkdir "$parts/unpacked"
  unpack nvidia-cuda-toolkit './usr/bin/*' './usr/lib/nvidia-cuda-toolkit/*'
  unpack nvidia-cuda-dev './usr/include/*' './usr/lib/*/libcud*.a'
  local tools=$parts/unpacked/usr/lib/nvidia-cuda-toolkit
  mkdir -p "$folder"/{bin,include,lib64,nvvm/bin}
  cp -a "$parts/unpacked/usr/include/." "$folder/include"
  cp -a "$parts"/unpacked/usr/lib/*/libcud{art_static,adevrt}.a "$folder/lib64"
  for tool in bin2c cudafe++ fatbinary nvlink ptxas; do
    cp -a "$parts/unpacked/usr/bin/$tool" "$folder/bin"
  done
  cp -a "$tools/bin/nvcc" "$tools/bin/crt" "$folder/bin"
  cp -a "$tools/bin/cicc" "$folder/nvvm/bin"
  cp -a "$tools/libdevice" "$folder/nvvm"
  # Debian's profile names Debian's folders; this one names what lies beside nvcc.
  cat >"$folder/bin/nvcc.profile" <<'PROFILE'
TOP = $(_HERE_)/..
CICC_PATH = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(CICC_PATH):$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64" $(_SPACE_)
PROFILE
}

case $major in
12 | 13) "cuda_$major" ;;
*)
  echo "cuda-toolkit.sh: no recipe for CUDA $major; there is one for 12 and one for 13" >&2
  exit 2
  ;;
esac
"$folder/bin/nvcc" --version | sed -n 's/^.*release.*, V/nvcc /p'
