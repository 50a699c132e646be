// What the scripts of all Node clients share.
import { readFileSync } from "node:fs";
import { basename, join } from "node:path";

export const URL = process.env.HERMES_URL;
export const KEY = process.env.HERMES_KEY;
export const calls = [];

export function weatherIn(city) {
  calls.push(city);
  return `sunny in ${city}`;
}

export async function play(name, scenarios) {
  const version = JSON.parse(readFileSync(join(process.env.HERMES_NODE_MODULES, name, "package.json"))).version;
  for (const [scenario, run] of Object.entries(scenarios)) {
    const ledger = join(process.env.HERMES_LEDGERS, `${basename(process.argv[1])}.${scenario}`);
    calls.length = 0;
    const told = { scenario, version, ledger };
    try {
      told.result = await run(`scenario:${scenario.split("__")[0]} ledger:${ledger}`);
    } catch (error) {
      told.error = `${error?.constructor?.name}: ${error?.message}`;
      told.trace = String(error?.stack).slice(0, 3000);
    }
    told.calls = calls.length;
    console.log("SCENARIO " + JSON.stringify(told));
  }
}
