#Requires -Version 5.1
<#
.SYNOPSIS
Sets Rackless up on this Windows PC: the window and the command line, for this user alone.

.DESCRIPTION
  powershell -ExecutionPolicy Bypass -File installers\setup.ps1          set up
  powershell -ExecutionPolicy Bypass -File installers\setup.ps1 demo     run the demo, inside WSL
  powershell -ExecutionPolicy Bypass -File installers\setup.ps1 test     run all tests, inside WSL

  -DryRun   changes nothing; prints as JSON what it would change
  -Undo     removes all that this script has made; your runs and settings stay
  -Yes      does not ask

Wants Python 3.11 to 3.14 (64 bit), and offers to get it through winget where there is none. Packages
are those of installers\app.lock: pip compares every file with its hash and builds nothing but
Rackless itself. Everything lies in %LOCALAPPDATA%\Programs\Rackless; nothing needs an administrator.
Training needs Linux: docs\windows.md says how this PC becomes a node through WSL2.
#>
[CmdletBinding()]
param(
    [string]$Job = '',
    [switch]$DryRun,
    [switch]$Undo,
    [switch]$Yes
)
$ErrorActionPreference = 'Stop'
# Exit codes of programs are looked at one by one; PowerShell 7 can throw for them.
$PSNativeCommandUseErrorActionPreference = $false
$Versions = @('3.13', '3.12', '3.14', '3.11')
$WingetPython = 'Python.Python.3.13'
$Project = Split-Path -Path $PSScriptRoot -Parent
$Folder = Join-Path -Path $env:LOCALAPPDATA -ChildPath 'Programs\Rackless'
$Venv = Join-Path -Path $Folder -ChildPath 'venv'
$Bin = Join-Path -Path $Folder -ChildPath 'bin'
$Stamp = Join-Path -Path $Venv -ChildPath 'setup-done.txt'
$Launcher = Join-Path -Path $Bin -ChildPath 'rackless.cmd'
$LauncherText = '@"%~dp0..\venv\Scripts\rackless.exe" %*' + "`r`n"
$Shortcut = Join-Path -Path $env:APPDATA -ChildPath 'Microsoft\Windows\Start Menu\Programs\Rackless.lnk'
$AppLock = Join-Path -Path $Project -ChildPath 'installers\app.lock'
$TrainLock = Join-Path -Path $Project -ChildPath 'resources\environments\train.lock'
$Environment = 'HKCU:\Environment'
# No quotation marks: PowerShell 5.1 loses them on their way to a program.
$Probe = 'import sys, struct; print(*sys.version_info[:2], struct.calcsize(chr(80)) * 8)'

# ------------------------------------------------------------------ Python

# Returns its version where it is one that fits, else nothing; the stub of the Store prints none.
function Get-PythonVersion {
    param([string]$Path)
    $said = (& $Path -I -c $Probe) -join ' '
    $found = [regex]::Match($said, '^(\d+) (\d+) 64\s*$')
    if (-not $found.Success) {
        return $null
    }
    $version = $found.Groups[1].Value + '.' + $found.Groups[2].Value
    if ($Versions -contains $version) {
        return $version
    }
    return $null
}

function Get-Candidates {
    $paths = @()
    if (Get-Command -Name 'py.exe' -ErrorAction SilentlyContinue) {
        $listed = @(& py.exe --list-paths)
        foreach ($version in $Versions) {
            foreach ($line in $listed) {
                $found = [regex]::Match($line, '^\s*-(V:)?(\d+\.\d+)\S*\s+(\*\s+)?(\S.*python\.exe)\s*$')
                if ($found.Success -and ($found.Groups[2].Value -eq $version)) {
                    $paths += $found.Groups[4].Value
                }
            }
        }
    }
    # Where winget puts it; this window does not know the new PATH yet.
    foreach ($version in $Versions) {
        $place = 'Programs\Python\Python' + ($version -replace '\.', '') + '\python.exe'
        $paths += Join-Path -Path $env:LOCALAPPDATA -ChildPath $place
    }
    $command = Get-Command -Name 'python.exe' -ErrorAction SilentlyContinue
    if ($command) {
        $paths += $command.Source
    }
    return $paths
}

function Find-Python {
    foreach ($path in @(Get-Candidates)) {
        if (Test-Path -LiteralPath $path) {
            $version = Get-PythonVersion -Path $path
            if ($version) {
                return @{ path = $path; version = $version }
            }
        }
    }
    return $null
}

function Install-Python {
    if (-not (Get-Command -Name 'winget.exe' -ErrorAction SilentlyContinue)) {
        throw 'there is no winget on this PC. Install Python 3.13 (64 bit) from https://www.python.org/downloads/windows/ and run this again.'
    }
    & winget.exe install --id $WingetPython --exact --scope user --accept-package-agreements --accept-source-agreements
    if ($LASTEXITCODE -ne 0) {
        throw ('winget could not install {0} (exit code {1}). Install Python 3.13 from https://www.python.org/downloads/windows/ and run this again.' -f $WingetPython, $LASTEXITCODE)
    }
}

# ------------------------------------------------------------------ what would change

function Get-Fingerprint {
    param($Python)
    $parts = @($Python.version, $Project)
    foreach ($name in @($AppLock, $TrainLock, (Join-Path -Path $Project -ChildPath 'pyproject.toml'))) {
        $hash = Get-FileHash -LiteralPath $name -Algorithm SHA256
        $parts += $hash.Hash
    }
    return ($parts -join ' ')
}

function Read-Text {
    param([string]$Path)
    if (Test-Path -LiteralPath $Path) {
        return [IO.File]::ReadAllText($Path)
    }
    return ''
}

# Unexpanded, so that %USERPROFILE% and the like stay as they are.
function Get-UserPath {
    $key = Get-Item -LiteralPath $Environment
    return [string]$key.GetValue('Path', '', 'DoNotExpandEnvironmentNames')
}

function Get-PathWithout {
    $parts = @((Get-UserPath) -split ';' | Where-Object -FilterScript { $_ -and ($_ -ne $Bin) })
    return ($parts -join ';')
}

function New-Change {
    param([string]$Id, [string]$Title, [string]$After)
    return [ordered]@{ id = $Id; title = $Title; after = $After }
}

function Get-Changes {
    param($Python)
    $changes = @()
    if (-not $Python) {
        $changes += New-Change -Id 'python' -Title 'Install Python through winget, for you alone' -After $WingetPython
    }
    if ((-not $Python) -or ((Read-Text -Path $Stamp) -ne (Get-Fingerprint -Python $Python))) {
        $changes += New-Change -Id 'environment' -Title 'Install Rackless and its locked packages' -After $Venv
    }
    if ((Read-Text -Path $Launcher) -ne $LauncherText) {
        $changes += New-Change -Id 'command' -Title 'Make the command rackless' -After $Launcher
    }
    if (-not ((Get-UserPath) -split ';' -contains $Bin)) {
        $changes += New-Change -Id 'path' -Title 'Add it to your PATH' -After $Bin
    }
    if (-not (Test-Path -LiteralPath $Shortcut)) {
        $changes += New-Change -Id 'shortcut' -Title 'Add Rackless to the Start menu' -After $Shortcut
    }
    return $changes
}

# ------------------------------------------------------------------ making it

function New-Folder {
    param([string]$Path)
    if (-not (Test-Path -LiteralPath $Path)) {
        [void](New-Item -ItemType Directory -Path $Path)
    }
}

# The lines of one package in a lock: pip takes it with its hash alone.
function Get-LockedPackage {
    param([string]$Name)
    $lines = @()
    $inside = $false
    foreach ($line in ((Read-Text -Path $TrainLock) -split '\r?\n')) {
        if (-not $line.StartsWith(' ')) {
            $inside = $line.StartsWith($Name + '==')
        }
        if ($inside) {
            $lines += $line
        }
    }
    return ($lines -join "`n") + "`n"
}

function Invoke-Pip {
    param([string]$What, [string[]]$Arguments)
    Write-Host ('  packages: ' + $What)
    $python = Join-Path -Path $Venv -ChildPath 'Scripts\python.exe'
    # Isolated: else a pip.py of the current folder would run in place of pip.
    & $python -I -m pip install --quiet --disable-pip-version-check --no-input --no-deps $Arguments
    if ($LASTEXITCODE -ne 0) {
        throw ('pip could not install {0}; its lines above say why. A hash that does not match means that the package index or a proxy serves another file than the one that was checked. Then run this again.' -f $What)
    }
}

function New-Environment {
    param($Python)
    if (Test-Path -LiteralPath $Venv) {
        Remove-Item -LiteralPath $Venv -Recurse -Force
    }
    New-Folder -Path $Folder
    $path = $Python.path
    & $path -I -m venv $Venv
    if ($LASTEXITCODE -ne 0) {
        throw ('the virtual environment could not be created in {0}.' -f $Venv)
    }
    Invoke-Pip -What 'window and command line' -Arguments @('--require-hashes', '--only-binary', ':all:', '--requirement', $AppLock)
    $needs = Join-Path -Path $Venv -ChildPath 'setuptools.lock'
    [IO.File]::WriteAllText($needs, (Get-LockedPackage -Name 'setuptools'))
    Invoke-Pip -What 'setuptools' -Arguments @('--require-hashes', '--only-binary', ':all:', '--requirement', $needs)
    Invoke-Pip -What 'Rackless itself' -Arguments @('--no-index', '--no-build-isolation', '--editable', $Project)
    # Written last: an environment without it is made anew.
    [IO.File]::WriteAllText($Stamp, (Get-Fingerprint -Python $Python))
}

function Set-UserPath {
    param([string]$Value)
    Set-ItemProperty -LiteralPath $Environment -Name 'Path' -Value $Value -Type ExpandString
    # Tells running programs that variables have changed.
    [Environment]::SetEnvironmentVariable('RACKLESS_SETUP', $null, 'User')
}

function New-Shortcut {
    $shell = New-Object -ComObject WScript.Shell
    $link = $shell.CreateShortcut($Shortcut)
    $link.TargetPath = Join-Path -Path $Venv -ChildPath 'Scripts\pythonw.exe'
    $link.Arguments = '-P -m app'
    $link.WorkingDirectory = $env:USERPROFILE
    $link.Description = 'The control centre for the GPU cluster you already own'
    $link.Save()
}

function Invoke-Change {
    param([string]$Id, $Python)
    switch ($Id) {
        'environment' { New-Environment -Python $Python }
        'command' {
            New-Folder -Path $Bin
            [IO.File]::WriteAllText($Launcher, $LauncherText)
        }
        'path' {
            $rest = Get-PathWithout
            $parts = @($rest, $Bin) | Where-Object -FilterScript { $_ }
            Set-UserPath -Value ($parts -join ';')
        }
        'shortcut' { New-Shortcut }
    }
}

function Remove-All {
    if ((Get-UserPath) -split ';' -contains $Bin) {
        Write-Host 'Removing it from your PATH'
        Set-UserPath -Value (Get-PathWithout)
    }
    foreach ($path in @($Shortcut, $Bin, $Venv)) {
        if (Test-Path -LiteralPath $path) {
            Write-Host ('Removing ' + $path)
            Remove-Item -LiteralPath $path -Recurse -Force
        }
    }
}

# ------------------------------------------------------------------ main

if (($Job -eq 'demo') -or ($Job -eq 'test')) {
    $wsl = Join-Path -Path $env:ProgramFiles -ChildPath 'WSL\wsl.exe'
    if (-not (Test-Path -LiteralPath $wsl)) {
        Write-Host ('The {0} needs Linux. Install WSL first: wsl --install -d Ubuntu-24.04, then run this again.' -f $Job)
        exit 1
    }
    # An environment of its own: the one of Windows has other files in the same places.
    & $wsl --cd $Project --exec sh -c ('RACKLESS_VENV=$HOME/.cache/rackless-venv sh installers/setup.sh ' + $Job)
    exit $LASTEXITCODE
}
if ($Job -ne '') {
    Write-Host 'usage: setup.ps1 [demo | test] [-DryRun] [-Undo] [-Yes]'
    exit 2
}
if ($Undo) {
    try {
        Remove-All
    } catch {
        Write-Host ('Not all could be removed: {0} Close Rackless and run this again.' -f $_)
        exit 1
    }
    Write-Host 'Removed. Your runs and settings stay in the folder of Rackless below %LOCALAPPDATA%; Python stays as well.'
    exit 0
}

$python = Find-Python
$changes = @(Get-Changes -Python $python)
if ($DryRun) {
    ConvertTo-Json -InputObject ([ordered]@{ python = $python; changes = $changes }) -Depth 4
    exit 0
}
if ($changes.Count -eq 0) {
    Write-Host 'All is set up already. Start it from the Start menu, or type: rackless'
    exit 0
}
Write-Host 'Rackless: setting up for this user'
foreach ($change in $changes) {
    Write-Host ('  {0}: {1}' -f $change.title, $change.after)
}
if (-not $Yes) {
    $answer = Read-Host -Prompt 'Do that? [y/N]'
    if (-not ($answer -match '^\s*(y|yes)\s*$')) {
        Write-Host 'Nothing was changed.'
        exit 1
    }
}
try {
    if (-not $python) {
        Install-Python
        $python = Find-Python
        if (-not $python) {
            throw 'Python was installed, but is not found. Open a new PowerShell and run this again.'
        }
    }
    foreach ($change in $changes) {
        Invoke-Change -Id $change.id -Python $python
    }
} catch {
    Write-Host ('Set-up stopped: {0}' -f $_)
    exit 1
}
Write-Host 'Done. Start Rackless from the Start menu, or type rackless in a new terminal.'
exit 0
