"""The lab: configurations, data, training, runs and tables on top of the library, which never imports it."""
