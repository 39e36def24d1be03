#!/usr/bin/env bash
# Changes one file in every way that cosmic-ray knows, one at a time, and runs tests on each change. Prints the changes that no test
# caught. Works in a copy of the checkout under build/mutants; run by hand, since each change takes as long as the tests.
#
#   launch/mutants.sh PYTHON FILE TESTS...        overlap_train/schedule/order.py tests/protocol/test_strips.py -x
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "make mutants: needs FILE=overlap_train/... and TESTS=tests/..." >&2
    exit 2
fi
cd "$(dirname "$0")/.."
python=$PWD/$1 file=$2
shift 2
work=$PWD/build/mutants
export PATH=$work/cosmic-ray/bin:$PATH

[ -d "$work/cosmic-ray" ] || "$python" -m pip install -q --target "$work/cosmic-ray" 'cosmic-ray==8.*'
rm -rf "$work/copy" "$work/session.sqlite"
mkdir -p "$work/copy"
git ls-files -z --cached --others --exclude-standard | tar --null -T - -cf - | tar -C "$work/copy" -xf -
cd "$work/copy"
launch/layout.sh
cat >"$work/config.toml" <<EOF
[cosmic-ray]
module-path = "$file"
timeout = 600.0
excluded-modules = []
test-command = "$python -P -m pytest -q -x -p no:cacheprovider $*"
[cosmic-ray.distributor]
name = "local"
EOF
cosmic_ray() { PYTHONPATH=$work/copy/build/layout:$work/copy:$work/cosmic-ray OMP_NUM_THREADS=1 "$python" -P -m "$@"; }
cosmic_ray cosmic_ray.cli init "$work/config.toml" "$work/session.sqlite"
cosmic_ray cosmic_ray.cli baseline "$work/config.toml"
cosmic_ray cosmic_ray.cli exec "$work/config.toml" "$work/session.sqlite"
cosmic_ray cosmic_ray.tools.report --show-diff --surviving-only "$work/session.sqlite"
