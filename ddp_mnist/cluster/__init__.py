"""Processes and machines that find each other, agree, and notice who is lost: the only folder that
opens a socket. Imports config, deadline and errors; knows no data set and no run folder."""
