"""The demo: conversations about long documents, with offloading off and on."""
