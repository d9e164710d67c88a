def write(asked, rows): pass
