// preact with htm's templates, and the hooks: the only libraries of the page.
import { Component, h, render } from "../../vendor/preact.js";
import htm from "../../vendor/htm.js";

export { Component, render };
export { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../../vendor/hooks.js";
export const html = htm.bind(h);
