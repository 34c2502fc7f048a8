#!/usr/bin/env bash
# The first hour of a new user: a new environment with the wheel in dist/ and its extra `cli`, outside the tree, with no
# compiler on the PATH. Runs the demo by name, writes a report, and makes mistakes. `make first-hour` builds the wheel.
# TORCH is the version of torch in the environment, by default that of constraints.txt.
set -euo pipefail
tree=$(cd "$(dirname "$0")/.." && pwd)
unset PYTHONPATH # of who works in a tree
shopt -s nullglob
wheels=("$tree"/dist/epmoe-*-py3-none-manylinux_*.whl)
[ "${#wheels[@]}" = 1 ] || { echo "first-hour: dist/ must hold one wheel, as \`make wheel\` leaves it"; exit 1; }

away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT
mkdir "$away/bin" "$away/home" "$away/user"
python=$(realpath -s "$(command -v "${PYTHON:-python3}")")
failed() { echo "first-hour: FAILED: $1"; [ -z "${2:-}" ] || sed 's/^/  | /' "$2"; exit 1; }

echo "first-hour: $(basename "${wheels[0]}"), $(du -h "${wheels[0]}" | cut -f1)"
"$python" -m venv "$away/venv"
cd "$away/user"
other=${TORCH:+^torch==}
grep -v "${other:-^$}" "$tree/constraints.txt" >"$away/constraints.txt"
"$away/venv/bin/pip" install --quiet --no-compile -c "$away/constraints.txt" "torch${TORCH:+==$TORCH}" "${wheels[0]}[cli]"

# What the wheel brings. Where nvcc is, so are the CUDA kernels, for each architecture that was asked for.
cuda=$(command -v nvcc || true)
"$away/venv/bin/python" - "${wheels[0]}" "$cuda" <<'CHECK'
import ctypes, sys, zipfile
from epmoe.native import build
names = zipfile.ZipFile(sys.argv[1]).namelist()
wanted = ["_native/libepmoe.so", "csrc/ops.cpp", "csrc/cuda_api.cu", "configs/cpu_demo.yaml", "py.typed"]
wanted += [f"_native/{build.CUDA_LIBRARY}"] if sys.argv[2] else []
missing = [name for name in wanted if f"epmoe/{name}" not in names]
assert not missing, f"the wheel lacks {missing}"
assert build.AHEAD_OF_TIME.exists(), build.AHEAD_OF_TIME
if sys.argv[2]:
    table = ctypes.CDLL(str(build.AHEAD_OF_TIME.with_name(build.CUDA_LIBRARY))).epmoe_cuda_api
    table.restype = ctypes.POINTER(ctypes.c_void_p)
    no_kernel_image = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)(table()[0])(209).decode()
    architectures = " ".join(name.removesuffix("+PTX").rstrip("af") for name in build.architectures())
    assert no_kernel_image.endswith(architectures), (no_kernel_image, architectures)
CHECK

# From here on: nothing of this tree, of its environment, or of a compiler.
for tool in cat env ls mkdir rm sh timeout uname; do ln -s "$(command -v $tool)" "$away/bin"; done
user() {
  env -i PATH="$away/venv/bin:$away/bin" HOME="$away/home" LANG=C.UTF-8 CUDA_VISIBLE_DEVICES= COLUMNS=100 \
    timeout 600 env "$@"
}

user epmoe run cpu_demo --report report.html >"$away/out" 2>&1 || failed "epmoe run cpu_demo: exit code $?" "$away/out"
grep -q '</html>' report.html || failed "there is no report"
[ -z "$(find "$away/home" -name '*.so')" ] || failed "a library was built, although the wheel has one"
rm report.html

# wrong CODE WORDS [VARIABLE=VALUE ...] epmoe ARGUMENTS: ends with CODE and says WORDS, on one screen, without a traceback,
# and leaves nothing behind. Two at a time. These depend on what is installed; tests/test_wrong_inputs.py has the others.
count=0
jobs=()
wrong() {
  count=$((count + 1))
  mkdir "$away/user/$count"
  (cd "$away/user/$count" && answered "$away/out$count" "$@") &
  jobs+=($!)
  [ "${#jobs[@]}" = 1 ] || both
}
both() {
  for job in "${jobs[@]}"; do wait "$job" || exit 1; done
  jobs=()
}
answered() {
  local out=$1 expected=$2 words=$3 code=0
  shift 3
  user "$@" >"$out" 2>&1 || code=$?
  [ "$code" = "$expected" ] || failed "$*: exit code $code in place of $expected" "$out"
  grep -qi -- "$words" "$out" || failed "$*: does not say '$words'" "$out"
  ! grep -q Traceback "$out" || failed "$*: a traceback" "$out"
  [ "$(wc -l <"$out")" -le 24 ] || failed "$*: more than one screen" "$out"
  [ -z "$(ls -A)" ] || failed "$*: leaves $(ls -A) behind"
}
wrong 2 "no such command" epmoe ran
wrong 2 "cpu_demo" epmoe run cpu_dem
wrong 2 "existing folder" epmoe run cpu_demo --report nowhere/report.html
wrong 2 "epmoe\[hf\]" epmoe run cpu_demo --model mixtral
wrong 2 "epmoe\[bench\]" epmoe bench cpu_bench --plot plot.png
wrong 2 "GPU" epmoe run h200x8_deepseek_v3
wrong 2 "does not load" EPMOE_LIBRARY=/nowhere/libepmoe.so epmoe run cpu_demo
wrong 1 "max_expert_rows" EPMOE_CAPACITY__MAX_EXPERT_ROWS=8 epmoe run cpu_demo
wrong 1 "fail" epmoe doctor h200x8_deepseek_v3
both
echo "first-hour: the demo ran, and $count mistakes were answered, in $SECONDS s"
