"""The lab: backbones, data, training loops and reports on top of the library, which never imports it."""
