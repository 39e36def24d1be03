#!/usr/bin/env bash
# Links the package into build/layout in its installed form, with kernels/ and integrations/ inside overlap_train/, because mypy and
# import-linter read folders and cannot follow the mapping of an editable install.
set -euo pipefail
cd "$(dirname "$0")/.."

package=build/layout/overlap_train
rm -rf build/layout
mkdir -p "$package"
ln -s "$PWD"/overlap_train/* "$PWD/kernels" "$PWD/integrations" "$package"
