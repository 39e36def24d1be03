# shellcheck shell=bash
# Finds Python interpreters to make an environment from. Sourced by bootstrap.sh.

# without_environments PATH: prints PATH without the folders of bootstrap.sh's environments, under whatever name.
without_environments() {
    local folder folders kept=
    IFS=: read -ra folders <<<"$1"
    for folder in "${folders[@]}"; do
        if ! [[ $folder -ef .venv/bin || $folder -ef .venv-other/bin ]]; then kept+=:$folder; fi
    done
    printf '%s\n' "${kept#:}"
}

# An environment must not be made from itself. So an activated one leaves PATH, where a pyenv shim would find its python, too.
PATH=$(without_environments "$PATH")

# find_python VERSION: prints the path of an interpreter of this version (such as 3.12) that runs and can make virtual
# environments. Also looks outside PATH: pyenv, uv and source builds often install an interpreter elsewhere, and a pyenv shim on
# PATH may point to no interpreter.
find_python() {
    local version=$1 candidate
    while IFS= read -r candidate; do
        if is_python "$candidate" "$version"; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done < <(python_candidates "$version")
    return 1
}

python_candidates() {
    local version=$1
    on_path "python$version" python3
    compgen -G "${PYENV_ROOT:-${HOME-}/.pyenv}/versions/$version*/bin/python" || true
    compgen -G "${HOME-}/.local/share/uv/python/cpython-$version*/bin/python$version" || true
    compgen -G "/usr/local/bin/python$version" || true
    compgen -G "/opt/*/bin/python$version" || true
    compgen -G "/opt/*/*/bin/python$version" || true
}

on_path() { type -aP "$@" || true; }

is_python() {
    local check='import sys, ensurepip, venv; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])'
    [ -x "$1" ] && "$1" -c "$check" "$2" </dev/null >/dev/null 2>&1
}

has_gpu() { [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]]; }

# gpu_python: prints the first interpreter on PATH whose torch is 2.11 or newer and sees a GPU; returns 1 if there is none.
gpu_python() {
    local candidate
    has_gpu || return 1
    while IFS= read -r candidate; do
        if torch_sees_gpu "$candidate"; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done < <(on_path python3 python)
    return 1
}

torch_sees_gpu() {
    local check='
import sys, torch
version = tuple(int(part) for part in torch.__version__.split(".")[:2])
sys.exit(not (torch.cuda.is_available() and version >= (2, 11) and (3, 11) <= sys.version_info < (3, 14)))'
    "$1" -c "$check" </dev/null >/dev/null 2>&1
}
