#!/usr/bin/env bash
# What CI runs: format, lint, types, the C++ core without warnings, its tests under sanitizers,
# pytest. Expects an environment with `pip install -e '.[test,dev]'` to be active.
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n== %s\n' "$*"; }

configure() { # configure FOLDER OPTION...
    cmake -S . -B "$1" -G Ninja -DCMAKE_PREFIX_PATH="$site_packages" \
        -DPython3_EXECUTABLE="$(command -v python)" "${@:2}" >/dev/null
}

site_packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

step 'format and lint'
ruff format --check .
ruff check .
mapfile -d '' cpp_files < <(find csrc tests/cpp \( -name '*.cpp' -o -name '*.h' \) -print0 2>/dev/null)
clang-format --dry-run -Werror "${cpp_files[@]}"

step 'types'
mypy

step 'core without warnings'
configure build/werror -DDFLASH_WERROR=ON
cmake --build build/werror

if [[ -f tests/cpp/CMakeLists.txt ]]; then
    step 'C++ tests under the address and undefined-behaviour sanitizers'
    configure build/sanitize -DDFLASH_TESTS=ON -DDFLASH_SANITIZE=ON
    cmake --build build/sanitize
    ctest --test-dir build/sanitize --output-on-failure
fi

step 'tests'
pytest
