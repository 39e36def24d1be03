#!/usr/bin/env bash
# Makes the virtual environment that the Makefile's commands run in.
#
#   launch/bootstrap.sh main    .venv: the torch that already sees this machine's GPUs; without one, the first tested set
#                               whose Python and disk space are here (3.12, else 3.11)
#   launch/bootstrap.sh other   .venv-other: the other tested set; does nothing when its Python is not here
#
# Does nothing if pyproject.toml and the constraints have not changed. An interrupted set-up starts again.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=launch/python.sh
. launch/python.sh

say() { printf '[set-up] %s\n' "$*"; }
die() {
    printf '[set-up] error: %s\n' "$*" >&2
    exit 1
}

main() {
    case ${1-} in
        main) env=.venv ;;
        other) env=.venv-other ;;
        *) die "usage: launch/bootstrap.sh main|other" ;;
    esac
    if [ -L "$env" ]; then die "$env is a link to another folder's environment: remove the link, or run $env/bin/python yourself"; fi
    # Two commands started at once must not build the same environment.
    if command -v flock >/dev/null; then
        exec 9>"$env.lock"
        flock 9
    fi
    if is_complete; then return; fi
    if ! "choose_$1"; then return; fi
    started=$SECONDS updates=
    create
    if [ "$tested" = system ]; then install_beside_system; else install_tested; fi
    fingerprint >"$env/complete"
    say "$env is ready after $((SECONDS - started)) s"
}

# Everything that decides the contents of an environment. A finished set-up writes it to the environment's file "complete".
fingerprint() {
    cksum pyproject.toml constraints/*.txt launch/bootstrap.sh
    if has_gpu; then echo "with GPUs"; fi
    pwd # an editable install remembers its folder
}

is_complete() { "$env/bin/python" -V >/dev/null 2>&1 && [ "$(cat "$env/complete" 2>/dev/null)" = "$(fingerprint)" ]; }

# choose_main and choose_other set python (an interpreter) and tested (a file of constraints/, or "system": keep the torch that is
# already installed).
choose_main() {
    if python=$(gpu_python); then
        tested=system
    elif python=$(find_python 3.12) && ! prefers_small_set; then
        tested=py312
    elif python=$(find_python 3.11); then
        tested=py311
    else
        die "needs Python 3.12 or 3.11 with its venv module; looked on PATH, in pyenv, uv, /usr/local and /opt"
    fi
}

# Whether .venv gets the Python 3.11 set although there is a Python 3.12. The Python 3.12 set takes 5 GB, and its downloads 2 GB until
# it is installed. The other one takes 2.2 GB in all where pip finds a CPU build of torch 2.13.
prefers_small_set() {
    local free
    if [ -e "$env/complete" ] && [ "$(set_of "$env")" = py312 ]; then return 1; fi # an update takes little
    free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1024 / 1024) }')
    if ((free >= 8)) || ! find_python 3.11 >/dev/null; then return 1; fi
    say "$free GB of disk are free, the Python 3.12 set needs 8: taking the Python 3.11 set"
}

# set_of ENVIRONMENT: prints the tested set that it was made with; nothing if there is no such environment.
set_of() { cut -d ' ' -f 1 "$1/kind" 2>/dev/null || true; }

choose_other() {
    tested=py311 # .venv has the Python 3.12 set where there are a 3.12 and the disk space
    if gpu_python >/dev/null; then
        say "no second environment: this machine's commands use the torch that is already there"
    elif [ "$(set_of .venv)" = py311 ] || ! find_python 3.12 >/dev/null; then
        say "no second environment: .venv already has the Python 3.11 set"
    elif ! python=$(find_python 3.11); then
        say "no second environment: no Python 3.11 on this machine"
    else
        return 0
    fi
    return 1
}

# Updates an environment in place only if an earlier set-up of the same kind finished. After an interrupted one pip would take a
# half-copied package for an installed one.
create() {
    local kind="$tested $python $PWD"
    log=$env/install.log
    if [ -e "$env/complete" ] && [ "$(cat "$env/kind")" = "$kind" ]; then
        say "updating $env: pyproject.toml or the constraints have changed"
        updates=yes
        rm "$env/complete"
        return
    fi
    # A user's own environment of this name, perhaps the one that overlap_train was just installed into.
    if [ -e "$env" ] && [ ! -e "$env/kind" ]; then
        die "$env was not made by this script, which would delete it: rename it, or run $env/bin/python yourself"
    fi
    if [ -e "$env" ]; then say "$env is unfinished or of another kind: starting again"; fi
    if [ -d "$env" ]; then empty; fi
    rm -rf "$env"
    say "making $env with $python ($("$python" -V 2>&1))"
    mkdir "$env"
    echo "$kind" >"$env/kind" # first: an interrupted set-up is known by it
    "$python" -m venv "$env" >/dev/null 2>&1 || {
        "$python" -m venv --clear --without-pip "$env"
        echo "$kind" >"$env/kind"
    }
}

# Deletes what was installed, but for kind, which says whose this environment is, and the log.
empty() { find "$env" -mindepth 1 -maxdepth 1 ! -name kind ! -name install.log -exec rm -rf {} +; }

# Nothing goes on from an unfinished set-up, and another environment may need its gigabytes. What was only to be updated stays.
give_up() {
    if [ -z "$updates" ]; then empty; fi
    die "$*; $(df -Ph . | awk 'NR == 2 { print $4 }') of disk are free now; the whole log: $log"
}

install_tested() {
    local constraints=constraints/$tested.txt extras=megatron,dev,plot size="0.2 to 2 GB to download, one to two minutes"
    [ "$tested" = py312 ] && size="2 GB to download, 5 GB on disk, one to three minutes"
    if compgen -G "$env/lib/*/site-packages/torch" >/dev/null; then size="what has changed"; fi
    if has_gpu; then extras=$extras,nvshmem; fi
    step "installing $(pinned torch) and $(pinned megatron-core) ($size)" \
        pip_install -c "$constraints" torch megatron-core setuptools || give_up "could not install torch and megatron-core"
    step "installing overlap-train and its test and lint tools (100 MB)" \
        pip_install -c "$constraints" --no-build-isolation -e ".[$extras]" || give_up "could not install overlap-train"
    step "compiling Python files (half a minute)" compile_python_files
}

# A fifth of all Python text, 10 s of one core: tests of other packages, and mypy, which runs from its own libraries.
never_imported='site-packages/(.*/)?(tests?|mypyc?)/'

# Uses all cores, where pip would use one. Without it every process of every test would compile torch and Megatron again under
# PYTHONDONTWRITEBYTECODE, 4 s each.
compile_python_files() { "$env/bin/python" -m compileall -q -j 0 -x "$never_imported" "$env/lib" || true; }

pinned() { grep "^$1==" "constraints/$tested.txt" | sed 's/==/ /; s/ *#.*//'; }

# Keeps torch and its packages and installs what is missing: from .whl/ if that folder has wheels (for machines without a package
# index), else from the index.
install_beside_system() {
    local kept=$env/kept.txt
    show_packages_of_python
    torch_packages >"$kept"
    say "keeping $(paste -s -d ' ' "$kept")"
    echo "numpy<2.4  # for Triton 3.6's interpreter" >>"$kept"
    if compgen -G '.whl/*.whl' >/dev/null; then
        step "installing the wheels of .whl/" pip_install --no-index --no-deps .whl/*.whl || die "could not install .whl/"
        install_alone
    elif ! step "installing overlap-train, megatron-core, nvshmem4py, test and lint tools (150 MB)" \
        pip_install -c "$kept" --no-build-isolation -e '.[megatron,nvshmem,dev,plot]'; then
        say "going on with what is there; without a package index, put wheels of what is missing into .whl/"
        install_alone
    fi
    report_missing
}

install_alone() {
    step "installing overlap-train" pip_install --no-index --no-deps --no-build-isolation -e . ||
        die "could not install overlap-train"
}

# Writes a .pth file instead of using --system-site-packages, which ignores the packages of a python that is itself in a virtual
# environment.
show_packages_of_python() {
    local site
    site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' >"$site/system.pth"
}

torch_packages() {
    "$env/bin/python" -c '
from importlib.metadata import distributions
kept = ("torch", "triton", "nvidia-nvshmem-cu13", "setuptools")
print(*sorted({f"{d.name}=={d.version}" for d in distributions() if d.name in kept}), sep="\n")'
}

report_missing() {
    local module
    for module in megatron.core:"make train and tests/megatron" psutil:"sharded checkpoints" nvshmem.core:"the NVSHMEM provider" \
        pytest:"make test" pytest_timeout:"make test" greenlet:"tests/protocol" ruff:"make lint"; do
        "$env/bin/python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('${module%%:*}') is None)" 2>/dev/null ||
            say "missing: ${module%%:*}, needed for ${module#*:}"
    done
}

# step runs this in the background. exec replaces the shell by pip, so that an interrupt ends pip.
pip_install() { exec "$env/bin/python" -m pip install --progress-bar off --no-compile --disable-pip-version-check "$@"; }

# step TEXT COMMAND...: runs a slow command, writes its output to the log and prints its progress every 15 seconds. If the command
# fails, shows the end of the log and returns 1.
step() {
    local text=$1 began=$SECONDS news=15 pid
    shift
    say "$text"
    "$@" >"$log" 2>&1 </dev/null &
    pid=$!
    # shellcheck disable=SC2064 # $pid is meant to be expanded now
    trap "kill $pid 2>/dev/null; exit 130" INT TERM
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.2
        if ((SECONDS - began >= news)); then
            say "  $((SECONDS - began)) s: $(progress)"
            news=$((news + 15))
        fi
    done
    trap - INT TERM
    if ! wait "$pid"; then
        say "  failed after $((SECONDS - began)) s; the end of the log:"
        grep -v 'is ignored' "$log" | tail -n 12 >&2
        return 1
    fi
}

# The newest line of pip's, and while it installs how much is there. What it downloads lies elsewhere until then.
progress() {
    local newest
    newest=$(grep -aoE '(Collecting|Downloading|Installing collected packages|Using cached) ?[^: ]*' "$log" | tail -n 1) || true
    case $newest in
        Installing*) echo "installing, $(du -sh "$env" | cut -f 1) on disk" ;;
        *) echo "${newest:-working}" ;;
    esac
}

main "$@"
