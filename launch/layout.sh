#!/usr/bin/env bash
# Links the package into build/layout as it is once installed, with kernels/ and integrations/ inside overlap_train/:
# mypy and import-linter read folders and cannot follow an editable install's mapping.
set -euo pipefail
cd "$(dirname "$0")/.."

package=build/layout/overlap_train
rm -rf build/layout
mkdir -p "$package"
ln -s "$PWD"/overlap_train/* "$PWD/kernels" "$PWD/integrations" "$package"
