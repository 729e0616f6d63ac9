"""The gateway and the scaling law under a virtual clock: only engines, networks and users are modelled."""
