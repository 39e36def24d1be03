"""Programs around training: doctor, tune, bench, launch. Nothing of training imports them."""
