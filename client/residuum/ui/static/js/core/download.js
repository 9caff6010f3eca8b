// Files that the page writes: CSV and PNG.

export function saveCsv(name, rows) {
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    // A text that begins like a formula would be one in a spreadsheet.
    const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  save(name, new Blob([rows.map((row) => row.map(cell).join(",")).join("\r\n")], { type: "text/csv" }));
}

export function savePng(name, canvas) {
  canvas.toBlob((blob) => save(name, blob), "image/png");
}

export function save(name, blob) {
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(blob);
  anchor.download = name.replace(/[^\w.-]+/g, "_");
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 10000);
}
